"""Kubernetes: a JobSet (jobset.x-k8s.io), which restarts all pods together when one of them fails."""

import json

from megalith.fleet.engines.launch import HOPELESS, Artefact, Launch, before, label, torchrun, variables
from megalith.spec.run import RunSpec

TEMPLATE = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
{namespace}spec:
  network:
    enableDNSHostnames: true        # pods find the first one by its name
  failurePolicy:
    maxRestarts: {restarts}
    rules:
      - name: hopeless              # the same command would fail again: leave the JobSet failed for a person to look at
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          completions: {nodes}
          parallelism: {nodes}
          backoffLimit: 0           # one pod's end ends all: the others would only wait for it
          podFailurePolicy:
            rules:
              - action: Ignore      # evicted or preempted: no failure of the run
                onPodConditions:
                  - type: DisruptionTarget
                    status: "True"
              - action: FailJob
                onExitCodes:
                  containerName: train
                  operator: In
                  values: {hopeless}
          template:
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: {grace}   # SIGTERM, time to save, SIGKILL
              containers:
                - name: train
                  image: {image}
                  command: ["/bin/bash", "-c"]
                  args: [{command}]
{workdir}                  env:
{environment}
{resources}                  volumeMounts:
                    - name: shared-memory
                      mountPath: /dev/shm
{mounts}              volumes:
                - name: shared-memory   # copies of the state, NCCL and gloo: the default of 64 MiB is too small
                  emptyDir:
                    medium: Memory
{volumes}"""


def emit(spec: RunSpec, launch: Launch) -> Artefact:
    """Return a manifest that `kubectl apply -f FILE` starts. Text from the user is written as JSON strings, which are also valid
    YAML."""
    name, quote = label(spec.name), json.dumps
    # torchrun ends with status 1 whatever its ranks ended with, so only what ends before or without it can be hopeless for sure
    hopeless = [code for code in HOPELESS if code != 1]
    limits = {"cpu": launch.cpus_per_node, "nvidia.com/gpu": launch.gpus_per_node}
    asked = "".join(f"                      {key}: {value}\n" for key, value in limits.items() if value)
    environment = "\n".join(
        f"                    - name: {key}\n                      value: {quote(value)}"
        for key, value in variables(launch).items()
    )
    key = f"{before(launch)} && " if launch.agent else ""
    command = f"{key}exec " + torchrun(spec, launch, endpoint=f"{name}-node-0-0.{name}:{launch.port}")
    claim = quote(launch.volume) if launch.volume else None
    text = TEMPLATE.format(
        name=name,
        namespace=f"  namespace: {quote(launch.namespace)}\n" if launch.namespace else "",
        restarts=launch.restarts,
        nodes=launch.nodes(spec) + launch.spares,
        hopeless=hopeless,
        grace=launch.grace,
        image=quote(launch.image or "megalith:latest"),
        command=quote(command),
        workdir=f"                  workingDir: {quote(launch.workdir)}\n" if launch.workdir else "",
        environment=environment,
        resources=f"                  resources:\n                    limits:\n{asked}" if asked else "",
        mounts="                    - name: shared\n                      mountPath: /shared\n" if claim else "",
        volumes=f"                - name: shared\n                  persistentVolumeClaim:\n                    claimName: {claim}\n"
        if claim
        else "",
    )
    return Artefact(f"{name}.yaml", text, f"kubectl apply -f {name}.yaml")

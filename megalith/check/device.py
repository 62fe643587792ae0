"""Rules about the cluster: its devices, and the links between them."""

from megalith.check.case import Case, Found, advice, error
from megalith.spec import cluster as clusters
from megalith.spec.numbers import PRECISIONS
from megalith.spec.problem import SpecErrors


def cluster_is_known(case: Case) -> Found:
    """The catalogue knows the cluster's accelerator: MFU needs its peak."""
    if case.spec.cluster != "local":
        try:
            clusters.load(case.spec.cluster)
        except SpecErrors as errors:
            yield from errors.problems


def tensor_stays_on_fast_links(case: Case) -> Found:
    """Tensor parallelism moves activations in every layer: tensor ranks belong inside one domain of fast links."""
    if case.cluster is None:
        return
    device = case.cluster.accelerator
    if case.plan.tensor > device.scale_up_domain:
        slower = case.cluster.scale_out
        rates = (
            f"; between two groups of joined devices the rate falls from {device.scale_up / 1e9:g} to {slower / 1e9:g} GB/s a device"
            if device.scale_up and slower
            else ""
        )
        reason = f"is more than the {device.scale_up_domain} {device.name} that fast links join{rates}"
        way_out = f"Use tensor <= {device.scale_up_domain}, and pipeline or data parallelism for the other ranks."
        yield advice("plan.tensor", case.plan.tensor, reason, way_out)


def experts_stay_on_fast_links(case: Case) -> Found:
    """Every layer of experts sends each token to its experts and back. Inside a domain of fast links the tokens arrive fast; over
    the network these messages limit the speed."""
    if case.cluster is None:
        return
    device, plan = case.cluster.accelerator, case.plan
    line = plan.expert * plan.expert_tensor
    if line > device.scale_up_domain and plan.expert > 1:
        ranks = f"{line} neighbouring ranks" if plan.expert_tensor > 1 else f"{line} ranks"
        reason = f"sends tokens between {ranks}, more than the {device.scale_up_domain} {device.name} that fast links join"
        most = max(1, device.scale_up_domain // plan.expert_tensor)
        way_out = (
            f"Use expert <= {most} if each rank has memory for more experts; else use a schedule that hides the messages, such "
            "as dualpipe or dualpipev."
        )
        yield advice("plan.expert", plan.expert, reason, way_out)


def device_suits(case: Case) -> Found:
    """`train.device` is the cluster's kind of device, and the cluster computes in `train.precision`."""
    if case.cluster is None:
        return
    train, device = case.spec.train, case.cluster.accelerator
    if train.device != "auto" and (train.device == "cpu") != device.is_processor:
        yield error("train.device", train.device, f'contradicts cluster = "{case.spec.cluster}"', 'Use "auto".')
    if device.peak and PRECISIONS[train.precision].rate not in device.peak:
        rate = f"; the emulation reaches at most fp32's {device.peak['fp32'] / 1e12:g} TFLOP/s" if "fp32" in device.peak else ""
        known = ", ".join(device.peak)
        yield advice(
            "train.precision",
            train.precision,
            f"{device.name} only emulates this precision{rate}",
            f"The device computes in {known}.",
        )

"""A module that leaves a thread behind when it is imported: nothing that a fork server may hold."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

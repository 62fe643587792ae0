"""A module whose import leaves a thread behind, so a fork server must not import it."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

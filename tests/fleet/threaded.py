"""A module whose import starts a thread, so a fork server must not import it."""

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()

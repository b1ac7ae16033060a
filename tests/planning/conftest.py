"""As in session: nothing is left behind."""

from tests.session.conftest import nothing_left

__all__ = ["nothing_left"]

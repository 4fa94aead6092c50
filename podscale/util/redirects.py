"""HTTP clients that follow no redirect, which could lead a token to another host or end in a page for browsers."""

from typing import Any
from urllib.request import HTTPRedirectHandler


class NoRedirect(HTTPRedirectHandler):
    """Handler for `build_opener`: a redirect is an HTTPError."""

    def redirect_request(self, *arguments: Any, **options: Any) -> None:
        """Return no request."""

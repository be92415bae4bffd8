"""Which web pages of other origins may call the API (CORS)."""

from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# Pages served by programs on this machine. No site has such an origin, whatever its name resolves to.
_LOCAL = r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
# Response headers that browsers show to pages, besides the usual headers.
_SHOWN = ("X-Request-Id", "Retry-After")


@dataclass(frozen=True)
class Origins:
    """named: origins, or "*" for all. local: whether pages of this machine may call, too."""

    named: tuple[str, ...] = ()
    local: bool = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """Returns the application with CORS headers. Cookies are never sent: tokens are in a header."""
        if not self.named and not self.local:
            return app
        return CORSMiddleware(
            app,
            allow_origins=self.named,
            allow_origin_regex=_LOCAL if self.local else None,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=_SHOWN,
        )

"""Which web pages may call the API: a browser asks before it hands an answer of another origin to one (CORS)."""

from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

# Pages that programs of this machine serve. No site has such an origin, whatever its name leads to.
_LOCAL = r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
# Beside those that browsers always show.
_SHOWN = ("X-Request-Id", "Retry-After")


@dataclass(frozen=True)
class Origins:
    """named: origins, or "*" for all. local: also those of this machine."""

    named: tuple[str, ...] = ()
    local: bool = False

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application, with answers for browsers. Cookies are never sent: tokens are in a header."""
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

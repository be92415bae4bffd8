"""How many files and connections a process may have open."""

import resource

# As the units for systemd set it; a soft limit of 1,024 is common in shells, and few connections.
MOST = 65_536


def raise_limit() -> int:
    """Raises the soft limit as far as the hard one and `MOST` allow; returns the limit that holds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted

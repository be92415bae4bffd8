"""A grammar that becomes too complex for the compiler."""

# The compiler gives up after this number of tokens "a".
HEAVY, FOLLOWED = 'start: s\ns: "a" | ' + " ".join("s" * 60), 62

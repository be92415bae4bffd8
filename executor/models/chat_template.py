"""A chat template in a file, which replaces a model's own."""

from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from executor.errors import ModelError, first_line


def read_template(path: Path) -> str:
    """Returns the template in a file. Raises ModelError if it cannot be read or is not a template."""
    try:
        source = path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"cannot read the chat template {path}: {first_line(error)}; name a text file in UTF-8"
        ) from error
    try:
        ImmutableSandboxedEnvironment(extensions=[loopcontrols]).compile(source)
    # A break outside a loop becomes invalid Python code.
    except (jinja2.TemplateError, SyntaxError) as error:
        raise ModelError(
            f"the chat template {path} is no template of Jinja: {first_line(error)}; correct it, or leave the setting "
            "empty for the template of the model"
        ) from error
    return source

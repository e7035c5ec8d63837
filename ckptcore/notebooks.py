"""Objects that notebooks show as HTML."""

from __future__ import annotations

from ckptcore.errors import MissingDistributionError


class ShownInNotebooks:
    """An object that notebooks show as HTML, if the distribution that makes the HTML is installed."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the HTML. Without the distribution None, so that notebooks show the text of `repr`."""
        from ckptcore.distributions import import_name  # rarely used

        try:
            to_html = import_name("to_html")
        except MissingDistributionError:
            return None
        assert callable(to_html)
        html: str = to_html(self)
        return html

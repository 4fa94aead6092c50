"""Kubernetes quantities, such as 100m, 1536Mi or 4, as numbers."""

from decimal import Decimal


def parse_quantity(text: object) -> Decimal:
    """Parse a quantity; 0 if it is not one."""
    from kubernetes.utils.quantity import parse_quantity as parse

    try:
        return Decimal(parse(str(text)))
    except ValueError:
        return Decimal(0)

"""The activations in plain torch, for autograd in FP64, and what bounds the FP32 arithmetic of them."""

from oracle import TANH_SLOPE_UNITS, U

# Roundings in an activation or its derivative: its worst function, and the products and sums around it.
UNITS = 2 * TANH_SLOPE_UNITS


def halves(x):
    """Gates and ups: 32 columns of each in turn."""
    return (half.flatten(-2) for half in x.unflatten(-1, (-1, 2, 32)).unbind(-2))


def spread(x, columns):
    """(rows, N) to (rows, columns), N or 2N: a column's value at the columns of the pre-activation it comes from."""
    return x if x.shape[1] == columns else x.unflatten(-1, (-1, 1, 32)).expand(-1, -1, 2, -1).flatten(1)


def activate(name, x, p):
    """Of a pre-activation with parameters p, named as the operators' arguments."""
    if name == "identity":
        return x
    if name == "srelu":
        s = p.get("tanh_clamp_scale")
        return x.relu() ** 2 if s is None else (s * (x.relu() / s).tanh()) ** 2
    gate, up = halves(x)
    if name == "swiglu":
        return gate * gate.sigmoid() * up
    if name == "geglu":
        gate, up = gate.clamp(max=p["glu_clamp_max"]), up.clamp(p["glu_clamp_min"], p["glu_clamp_max"])
        return gate * (p["geglu_alpha"] * gate).sigmoid() * (up + p["linear_offset"])
    b1, b2 = p["situ_beta1"], p["situ_beta2"]  # situglu
    return b1 * (gate / b1).tanh() * gate.sigmoid() * b2 * (up / b2).tanh()


def fp32_bound(name, x):
    """(rows, N): error of FP32 arithmetic in the activation, or in a derivative with a factor of 1.

    Gated: both are products of one factor of at most |gate|, or a slope of at most 1 + 2 |gate| (alpha <= 2), and one of
    at most |up| + 1 (linear_offset <= 1), or a slope of at most 1.
    """
    if name in ("srelu", "identity"):
        return UNITS * U * (2 * x.abs() + x * x)
    gate, up = halves(x.abs())
    return UNITS * U * (1 + 2 * gate) * (1 + up)

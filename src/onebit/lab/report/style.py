"""How each optimizer looks, the same in every figure."""

POINTS = 100  # each point of a curve averages 1% of the steps, if as many steps are recorded

# Label, colour of Okabe and Ito's palette, line, marker. No two optimizers of a figure share a
# colour; lines and markers tell all of them apart.
LOOKS = {
    "adam": ("Adam", "#0072B2", "-", "o"),
    "onebit_adam": ("1-bit Adam", "#D55E00", "--", "s"),
    "onebit_adam_32bit": ("1-bit Adam (32 bits)", "#009E73", "-.", "^"),
    "naive_onebit_adam": ("Adam (1-bit naive)", "#CC79A7", ":", "D"),
    "sgd": ("SGD", "#E69F00", "-", "v"),
    "double_squeeze": ("DoubleSqueeze", "#56B4E9", "-.", "P"),
    "local_sgd": ("Local SGD", "#000000", ":", "X"),
    "momentum_sgd": ("Momentum SGD", "#E69F00", "--", "<"),
    "ef_momentum_sgd": ("EF momentum SGD", "#56B4E9", "-", "p"),
    "local_momentum_sgd": ("Local SGD with momentum", "#000000", "-.", "*"),
    "adam_variance_16bit": ("Adam, 16-bit variance", "#009E73", "--", "h"),
    "adam_variance_8bit": ("Adam, 8-bit variance", "#CC79A7", "-.", "d"),
    "adam_variance_4bit": ("Adam, 4-bit variance", "#E69F00", ":", "8"),
    "lazy_variance_3": ("Adam, lazy variance, tau = 3", "#009E73", ":", ">"),
    "lazy_variance_5": ("Adam, lazy variance, tau = 5", "#CC79A7", "-", "H"),
    "zero_one_adam": ("0/1 Adam", "#009E73", "-", "^"),
    "zero_one_adam_script": ("0/1 Adam, script's T_v", "#CC79A7", "--", "D"),
    "lamb": ("LAMB", "#0072B2", "--", "o"),
    "onebit_lamb": ("1-bit LAMB", "#D55E00", "-", "s"),
    "lamb_basic_onebit": ("LAMB + basic 1-bit", "#CC79A7", "-.", "D"),
}
# The names that the papers give to the same optimizers.
PAPER_NAMES = {
    "Adam": "adam",
    "variance norm (vanilla Adam)": "adam",
    "1-bit Adam": "onebit_adam",
    "1-bit Adam (32-bits)": "onebit_adam_32bit",
    "Adam (1-bit Naive)": "naive_onebit_adam",
    "Adam w/ basic gradient compression": "naive_onebit_adam",
    "SGD": "sgd",
    "DoubleSqueeze": "double_squeeze",
    "Local SGD": "local_sgd",
    "Momentum SGD": "momentum_sgd",
    "EF Momentum SGD": "ef_momentum_sgd",
    "Local SGD with Momentum": "local_momentum_sgd",
    "16-bit variance": "adam_variance_16bit",
    "8-bit variance": "adam_variance_8bit",
    "lazy variance tau=3": "lazy_variance_3",
    "lazy variance tau=5": "lazy_variance_5",
    "Discriminator (Adam)": "adam",
    "Discriminator (1-bit Adam)": "onebit_adam",
    "Generator (Adam)": "adam",
    "Generator (1-bit Adam)": "onebit_adam",
    "||v_t - v_{t-1}||": "adam",
}


def look(optimizer: str, label: str | None) -> dict:
    """The look of an optimizer's line, as arguments of `Axes.plot`."""
    _, colour, line, marker = LOOKS[optimizer]
    return {
        "color": colour,
        "linestyle": line,
        "marker": marker,
        "markevery": 0.15,
        "markersize": 4,
        "linewidth": 1.5,
        "label": label,
    }

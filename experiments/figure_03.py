"""Figure 3: the compressed all_reduce of three workers, drawn from the code's own partition."""

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from onebit.lab.bench.model.artifacts import LOOKS, ModelFigure
from onebit.lab.bench.model.check import Check
from onebit.lab.report import figure as figures
from onebit.lab.report.artifact import main
from onebit.layout import Layout
from onebit.time_model import message_bytes

WORKERS = 3
SHAPES = [(20, 30), (7, 40), (500,), (11,)]  # of four tensors, 1,391 elements
STAGES = (
    "1. Each worker compresses its momentum,\ncut into a chunk for each worker",
    "2. Gather (all_to_all):\nworker j has chunk j of all workers",
    "3. Average: worker j averages chunk j\nand compresses the average",
    "4. Scatter (all_gather):\nall workers have all averages",
)


def plot(found: Check) -> figures.Drawing:
    """A panel for each stage, a row in it for each worker."""
    layout = Layout(SHAPES, WORKERS)
    drawing, panels = figures.canvas(len(STAGES))
    for axes, stage in zip(panels, STAGES, strict=True):
        axes.set_title(stage, fontsize=9)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.2, WORKERS), xticks=[])
        axes.set_yticks([2.4 - i for i in range(WORKERS)], [f"worker {i}" for i in range(WORKERS)])
        axes.grid(False)
    for worker in range(WORKERS):
        draw_vector(panels[0], layout, worker)
        for sender in range(WORKERS):
            width = 1 / WORKERS
            draw_chunk(panels[1], worker, sender * width, width, worker, f"from {sender}")
            draw_chunk(panels[3], worker, sender * width, width, sender, "average")
        draw_chunk(panels[2], worker, worker / WORKERS, 1 / WORKERS, worker, "average")
    return drawing


def draw_vector(axes: Axes, layout: Layout, worker: int) -> None:
    """A worker's flat vector: chunks in the colours of their servers, lines where tensors begin."""
    for server in range(WORKERS):
        chunk = layout.chunk_of(server)
        start, width = chunk.start / layout.size, layout.chunk / layout.size
        draw_chunk(axes, worker, start, width, server, f"to {server}")
    for start in layout.starts[1:]:
        axes.plot([start / layout.size] * 2, [2.1 - worker, 2.7 - worker], color="k", linewidth=1)


def draw_chunk(axes: Axes, worker: int, start: float, width: float, server: int, text: str) -> None:
    """One chunk in a worker's row."""
    colour = LOOKS[2 * server][0]
    corner = (start, 2.1 - worker)
    axes.add_patch(Rectangle(corner, width, 0.6, facecolor=colour, alpha=0.5, edgecolor="0.3"))
    middle = (start + width / 2, 2.4 - worker)
    axes.annotate(text, middle, ha="center", va="center", fontsize=7)


LAYOUT = Layout(SHAPES, WORKERS)
ARTIFACT = ModelFigure(
    name="figure_03",
    title="The compressed all_reduce",
    plot=plot,
    note=f"Drawn from onebit.layout.Layout for {WORKERS} workers and tensors of "
    f"{', '.join(map(str, LAYOUT.numels))} elements (upright lines: where a tensor begins). A "
    f"chunk has {LAYOUT.chunk} elements, padding included, and travels as "
    f"{message_bytes(SHAPES, WORKERS)} bytes: a bit for each element, and a scale of 4 bytes for "
    "each piece of a tensor.",
)

if __name__ == "__main__":
    main(ARTIFACT)

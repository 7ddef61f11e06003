"""The networks of the examples on Fashion-MNIST: K-FAC and natural gradient against SGD with momentum."""

from __future__ import annotations

from learning.convnet_task import ConvNetTask
from learning.optimizers import CURVATURE_OPTIONS
from learning.task import Settings, Targets

GRIDS = {
    "SGD": (0.025, 0.05, 0.1, 0.2, 0.3),
    "K-FAC": (0.003, 0.005, 0.01, 0.02, 0.03),
    "NaturalGradient": (0.1, 0.2, 0.3, 0.4, 0.5),
}


class CurvatureConvNetTask(ConvNetTask):
    """The training loss counts: the mean over the batches since the last record."""

    name = "curvature-convnet"
    title = "A ConvNet"
    settings = Settings(batch=1024, steps=600, warm_up=20, evaluate_every=20)
    grids = GRIDS
    baseline = "SGD"
    goal = "training"
    targets = (
        Targets("K-FAC", steps=0.5, seconds=1.0),
        Targets("NaturalGradient", steps=0.5, seconds=1.0),
    )

    def describe(self, settings: Settings) -> str:
        data = self.data
        parameters = sum(p.numel() for p in self.model().parameters())
        return (
            f"The {self.network} of the examples, {parameters / 1e3:.3g} k parameters, on "
            f"{data.name} ({len(data.train_labels):,} images to train on); {settings.batch} images "
            f"per step for all optimizers; float32. {CURVATURE_OPTIONS}"
        )


class CurvatureMlpTask(CurvatureConvNetTask):
    name = "curvature-mlp"
    title = "A perceptron"
    network = "mlp"

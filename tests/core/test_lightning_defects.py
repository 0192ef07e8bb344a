"""L-13: defects of Lightning that this package guards. A test that fails here says that a guard may go."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LightningCLI


class Scalar(pl.LightningModule):
    """One weight, loss = weight: the gradient of a batch is 1."""

    def __init__(self, lr: float = 1.0):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(float(self.weight.grad))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(5), batch_size=1)


QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


def test_d_02_a_short_last_window_is_divided_by_the_full_length(tmp_path):
    # Guard: `Normalizer.finish`.
    module = Scalar()
    trainer = pl.Trainer(**QUIET, accumulate_grad_batches=4, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.fit(module)
    assert module.gradients == [1.0, 0.25]


def test_l_01_a_checkpoints_hyper_parameters_beat_what_was_typed(tmp_path):
    # Guard: `GTPOCLI._parse_ckpt_path`.
    flags = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET.items()]

    def run(*args):
        place = f"--trainer.default_root_dir={tmp_path}"
        return LightningCLI(Scalar, save_config_callback=None, args=["fit", *flags, place, *args])

    first = run("--model.lr=0.001")
    path = first.trainer.checkpoint_callback.best_model_path
    again = run("--ckpt_path", path, "--model.lr=0.5", "--trainer.max_epochs=2")
    assert again.model.lr == 0.001

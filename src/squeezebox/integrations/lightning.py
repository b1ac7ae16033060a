"""A callback for Lightning's Trainer; ``pip install 'squeezebox[lightning]'``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from squeezebox.integrations._training import Training
from squeezebox.reports import Report
from squeezebox.schema import AttachError, OutOfMemoryError
from squeezebox.session import Session


class SqueezeboxCallback(Callback):
    """Squeeze what a ``LightningModule`` saves between ``training_step`` and its backward.

    ::

        callback = SqueezeboxCallback(noise=1e-3)
        Trainer(callbacks=[callback]).fit(module, loader)
        print(callback.report)

    Everything that ``training_step`` computes is covered, the loss too, up to its backward. With manual
    optimization, or an optimizer that calls its closure again, that is up to each backward and from each on;
    peaks are then measured without ``optimizer.step()``.
    The session begins when training starts and ends with it, also when that raises. Its state is in every
    checkpoint, and training that goes on from one goes on to the bit, as far as the rest of it does. Of
    several ranks it is the first one's: with ``noise=`` the others go on with its bounds. The trainer's
    loggers get the figures of reports, such as ``squeezebox/packed_bytes``, when the trainer logs.

    Args:
        options: of :func:`squeezebox.attach`, but for the optimizer, which is the trainer's. A module with
            several is given none of them.
    """

    def __init__(self, **options: Any) -> None:
        self._training = Training(options)
        self._step = contextlib.ExitStack()
        self._batch: Any = ()  # of it, what the trainer holds and nobody packs
        self._fits = True  # unless setup() says otherwise
        self._is_open = self._calls_again = False

    @property
    def session(self) -> Session:
        """Of the current training, or the last one; AttachError before the first."""
        return self._training.session

    @property
    def report(self) -> Report:
        """Of the last step; AttachError before the first."""
        return self._training.report

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """What begins may be a test of a checkpoint, whose state is not for the next training."""
        self._fits = stage == "fit"

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """What began is over."""
        self._fits = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module, whatever the strategy has wrapped around it."""
        every = trainer.accumulate_grad_batches
        self._training.begin(pl_module, trainer.optimizers, ranks=trainer.world_size, accumulate=every)
        self._calls_again = any(isinstance(each, torch.optim.LBFGS) for each in trainer.optimizers)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to squeeze: ``training_step`` follows.

        Lightning lets go of gradients only before the next backward, and a plan counts none in forward. A
        module that does this in its own way goes on to.
        """
        own = type(pl_module).optimizer_zero_grad is not LightningModule.optimizer_zero_grad
        first = batch_idx % trainer.accumulate_grad_batches == 0
        if self._training.is_planned and first and pl_module.automatic_optimization and not own:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
        has_target = self._training.is_planned and isinstance(batch, (tuple, list)) and len(batch) == 2
        self._batch = batch[0] if has_target else batch  # a plan packs its sample's target
        self._open()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """All is saved that this backward reads."""
        self._calls_again |= not self._is_open
        self._close()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """With manual optimization ``training_step`` goes on, and some optimizers call it again."""
        if self._calls_again or not pl_module.automatic_optimization:
            self._open()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step also where there was no backward; log the report's figures when the trainer logs."""
        self._close()
        self._batch = ()
        loop = trainer.fit_loop.epoch_loop  # of which Lightning's own callbacks read the same
        adds_up = pl_module.automatic_optimization and loop._should_accumulate()
        if trainer.loggers and trainer._logger_connector.should_update_logs and not adds_up:
            with contextlib.suppress(AttachError):  # nothing was captured yet
                figures = self.report.figures()
                for logger in trainer.loggers:
                    logger.log_metrics(figures, step=loop._batches_that_stepped)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was. If memory ran out, the error's message becomes what explains it.

        The error stays the same, as raising another one here would end Lightning's own clean-up, which
        writes checkpoints too.
        """
        try:
            self._training.fail(pl_module, exception, self._end)
        except OutOfMemoryError as explained:
            exception.args = (str(explained),)

    def state_dict(self) -> dict[str, Any]:
        """The session's state, for Lightning's checkpoint."""
        return self._training.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from it when training starts, unless it comes with a checkpoint that is only tested."""
        if self._fits:
            self._training.load(state_dict)

    def _open(self) -> None:
        self._close()  # a batch that was skipped has no end
        self._step.enter_context(self._training.session.step(self._batch))
        self._is_open = True

    def _close(self) -> None:
        self._is_open = False
        self._step.close()

    def _end(self) -> None:
        self._close()
        self._batch = ()
        self._training.end()

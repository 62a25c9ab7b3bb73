"""PyTorch-elastic tasks that register without torch and never call a preempted training a success.

Two differences from the plugin's ``Elastic``. Its task imports torch to be defined, only to parse ``nnodes``;
ours does not, so any machine can register the graph. And the plugin turns SIGTERM (a drained node) into exit
code 0 without outputs; a task of one node here fails as recoverable instead, so that Flyte runs it again.
With several nodes the plugin's behaviour stays: elastic itself restarts the group on the nodes that are left.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flytekit import PythonFunctionTask
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekitplugins.kfpytorch.task import Elastic, PytorchElasticFunctionTask


class TrainingPreempted(Exception):
    """The node of a single-node training was taken away; nothing was published."""


@dataclass
class TorchElastic(Elastic):
    """``Elastic`` with a fixed number of nodes; a range is refused."""

    @property
    def num_nodes(self) -> int:
        return int(self.nnodes)


_PREEMPTED = object()


class TorchElasticTask(PytorchElasticFunctionTask):
    def __init__(self, task_config: TorchElastic, task_function: Callable, **kwargs: Any):
        self.num_nodes = task_config.num_nodes
        standalone = self.num_nodes == 1
        PythonFunctionTask.__init__(
            self,
            task_config=task_config,
            task_type=self._ELASTIC_TASK_TYPE_STANDALONE if standalone else self._ELASTIC_TASK_TYPE,
            task_function=task_function,
            task_type_version=1,
            **kwargs,
        )
        self.min_nodes = self.max_nodes = self.num_nodes
        self.rdzv_backend = "c10d"

    def execute(self, **kwargs: Any) -> Any:
        os.environ.setdefault(
            "OMP_NUM_THREADS", "1"
        )  # torchrun's default too; unset, the plugin warns at every call
        try:
            return super().execute(**kwargs)
        except IgnoreOutputs as ignored:
            from torch.distributed.elastic.multiprocessing.api import SignalException

            if self.num_nodes == 1 and isinstance(ignored.__context__, SignalException):
                return _PREEMPTED
            raise  # the normal end of ranks other than the first node's

    def post_execute(self, user_params: Any, rval: Any) -> Any:
        if (
            rval is _PREEMPTED
        ):  # raised here, outside the user's code, Flyte counts it as the system's failure
            raise TrainingPreempted(
                "the training's processes got a signal to stop. Run the campaign again to go on."
            )
        return super().post_execute(user_params, rval)


TaskPlugins.register_pythontask_plugin(TorchElastic, TorchElasticTask)

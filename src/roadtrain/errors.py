"""The hierarchy of errors. A message names the problem, the expected value and the actual value.
`hint` names what the user can do about the problem.

RoadtrainError
+-- UserError                 the job, the model or the call is wrong; nothing was changed
|   +-- ConfigError           an unknown or contradictory option
|   |   +-- UnitError         a size or a rate with an unknown unit
|   +-- BudgetError           the request does not fit in memory or another limit; the hint is the
|   |                         smallest change that makes it fit
|   +-- ModelError            a model or a block that cannot be streamed exactly
|   +-- RuleError             an optimizer whose updates cannot run on servers, or wrong arguments
|   |                         of a kernel
|   +-- LoopError             the training loop did something that would make a step inexact
|       +-- DifferError       workers disagree about an operation (also a RuntimeError, as in
|       |                     Horovod)
|       +-- TwiceError        an operation of the same name is already in flight (also a ValueError,
|                             as in Horovod)
+-- StoreError                stored data cannot be used or written; the last committed step is kept
|   +-- DamagedError          data does not match its checksum, or is missing
|   +-- ForeignError          the store belongs to another job, model or format
|   +-- FullError             the disk is full
|   +-- GoneError             a directory or a file is missing
|   +-- StaleError            the store is behind a step that is known to be committed
|   +-- ForkedError           two copies of a store were trained separately, and it is unclear which
|   |                         copy to use
|   +-- DivergedError         two servers with replicas of a chunk have computed different bytes for
|                             the chunk in the same step
+-- LaunchError               a host or a process of a launched run cannot be used; processes that
|                             were already started are ended
+-- PeerError                 another node, for which this node waits, has failed or is lost
    +-- DeadlineError         a wait has timed out
    +-- LostError             the peer ended or the connection broke (cause: the peer's error)
    +-- WireError             the peer sent an invalid frame or handshake, or refused to communicate
    |   +-- BusyError         the peer is busy with other workers
    +-- AuthError             a token, a certificate or a user id does not match
"""

from __future__ import annotations


class RoadtrainError(Exception):
    """The base class of all errors that roadtrain raises on purpose.

    Args:
        message: What happened.
        hint: What to do about the problem. Shown below the message, and kept as an attribute.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message + (f"\nhint: {hint}" if hint else ""))
        self.hint = hint


class UserError(RoadtrainError): ...


class ConfigError(UserError): ...


class UnitError(ConfigError): ...


class BudgetError(UserError): ...


class ModelError(UserError): ...


class RuleError(UserError): ...


class LoopError(UserError): ...


class DifferError(LoopError, RuntimeError): ...


class TwiceError(LoopError, ValueError): ...


class StoreError(RoadtrainError): ...


class DamagedError(StoreError): ...


class ForeignError(StoreError): ...


class FullError(StoreError): ...


class GoneError(StoreError): ...


class StaleError(StoreError): ...


class ForkedError(StoreError): ...


class DivergedError(StoreError): ...


class LaunchError(RoadtrainError): ...


class PeerError(RoadtrainError): ...


class DeadlineError(PeerError): ...


class LostError(PeerError): ...


class WireError(PeerError): ...


class BusyError(WireError): ...


class AuthError(PeerError): ...

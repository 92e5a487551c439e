"""Meta-steps, or single steps with their derivative, as compiled programs."""

from innerloop.compiled._compiler import Compiler as Compiler
from innerloop.compiled._dynamo import opaque as opaque
from innerloop.guard.fingerprint import NotCompilableError as NotCompilableError
from innerloop.guard.fingerprint import fingerprint as fingerprint

"""Which meta-parameters of an inner loop a gradient reaches, and what keeps it from the others."""

from innerloop.diagnose.check import diagnose as diagnose
from innerloop.diagnose.report import Difference as Difference
from innerloop.diagnose.report import Finding as Finding
from innerloop.diagnose.report import Layer as Layer
from innerloop.diagnose.report import Report as Report
from innerloop.diagnose.report import Row as Row

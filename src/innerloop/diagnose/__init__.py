"""Diagnosis of an inner loop: which meta-parameters a gradient reaches, and what stops it."""

from innerloop.diagnose.check import diagnose as diagnose
from innerloop.diagnose.report import Difference as Difference
from innerloop.diagnose.report import Finding as Finding
from innerloop.diagnose.report import Report as Report
from innerloop.diagnose.report import Row as Row

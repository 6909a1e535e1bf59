"""What may be published of a study: the result's exact numbers in, numbers that everybody may read out.

A document is plain data. `allowed` has a rule for each of its keys; a key without a rule does not go out.
``k`` is the floor: nothing is said about 1 to k - 1 people. The rules, and what each hides:

* **One table is exact**: who was left out, the arms, and in each those with and without an outcome. A cell
  of 1 to k - 1 people becomes 0 or k (`counts.moved`), so that each of its sums and differences is 0 or at
  least k.
* **Every other count is rounded to multiples of k** (`counts.cut`, `counts.cells`), so that no comparison
  with another count shows a group of 1 to k - 1 people. The same group has the same number everywhere:
  rounded in two ways, it could be known exactly.
* **An estimate is rounded to a hundredth of its standard error**, that to three digits. Limits, p-values and
  tests are computed again from the rounded numbers, whose digits they would otherwise tell.
* **A mean is rounded to what one person can change at most**, and left out if one person could be more than
  half of it (`groups`).
* Sizes that describe the fit or the run have one or two digits. Iterates, messages and silos' sizes stay.

What remains: one person changes an estimate by D/n, D the value of the influence function. If D is one
standard deviation of it, that is 1/sqrt(n) standard errors: below a hundredth from n = 10,000 on; if it is
five, from n = 250,000 on. In a smaller study, whoever knows everybody else, or sees two results that differ
in one person, learns something of that person. The hospitals' memory of people stands against the second.
"""

from fedtmle_core.publish.allowed import published_emulation, published_result
from fedtmle_core.publish.counts import NotPublishableError

__all__ = ["NotPublishableError", "published_emulation", "published_result"]

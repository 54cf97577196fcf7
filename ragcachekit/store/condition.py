"""The condition variable, for modules that still import it from here."""

from ragcachekit.threads import Condition as Condition

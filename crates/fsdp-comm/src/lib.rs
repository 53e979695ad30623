//! What communicators share: collective algorithms over links, counters, the conformance suite.

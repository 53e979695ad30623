//! Encodes the results of a rank as 64-bit words, for the process that compares them. Floats keep their bits, including
//! non-finite ones.

use fsdp_core::comm::Traffic;
use fsdp_core::engine::StepReport;
use fsdp_core::memory::{Bytes, Category, Usage};
use fsdp_core::model::ParamId;

use super::RankRun;
use super::report::counts;
use super::snapshot::{Held, Pieces};
use crate::shard_runs::Kind;

/// Panic message for malformed bytes: ranks verify that they run the same program before they begin.
const SAME_PROGRAM: &str = "a rank of the same program has encoded it";

/// Encodes the results of a rank. Of the first step only gradients are included, since nothing else of it is compared.
pub(super) fn encode(run: &RankRun) -> Vec<u8> {
    let mut to = Writer(Vec::new());
    to.number(run.reports.len());
    for report in &run.reports {
        let &StepReport { loss, targets, grad_norm, finite, state_finite, stop, .. } = report;
        [loss.to_bits(), targets, grad_norm.to_bits()].into_iter().for_each(|word| to.word(word));
        [finite, state_finite, stop].into_iter().for_each(|flag| to.word(flag.into()));
        to.number(report.sums.len());
        report.sums.iter().for_each(|sum| to.word(sum.to_bits()));
        to.number(report.counts.len());
        report.counts.iter().for_each(|&count| to.word(count));
    }
    to.pieces(run.first.values.iter().filter(|held| held.kind == Kind::Gradient));
    to.pieces(run.last.values.iter());
    counts(&mut { run.traffic }).into_iter().flat_map(|(_, counts)| counts).for_each(|count| to.word(*count));
    for usage in [&run.settled, &run.usage] {
        for bytes in [&usage.device, &usage.host] {
            bytes.live_bytes.iter().chain(&bytes.peak_bytes).for_each(|&bytes| to.number(bytes));
            to.number(bytes.total_peak_bytes);
        }
        to.word(usage.allocations);
    }
    to.0
}

/// Decodes the bytes of [`encode`].
///
/// # Panics
/// If the bytes are not from [`encode`].
pub(super) fn decode(bytes: &[u8]) -> RankRun {
    let mut from = Reader(bytes);
    let reports = from.list(|from| StepReport {
        loss: from.float(),
        targets: from.word(),
        grad_norm: from.float(),
        finite: from.word() == 1,
        state_finite: from.word() == 1,
        stop: from.word() == 1,
        sums: from.list(Reader::float),
        counts: from.list(Reader::word),
    });
    let [first, last] = [(); 2].map(|()| Pieces { values: from.list(Reader::held) });
    let mut traffic = Traffic::default();
    counts(&mut traffic).into_iter().flat_map(|(_, counts)| counts).for_each(|count| *count = from.word());
    let [settled, usage] = [(); 2].map(|()| from.usage());
    assert!(from.0.is_empty(), "{SAME_PROGRAM}");
    RankRun { reports, first, last, traffic, settled, usage }
}

struct Writer(Vec<u8>);

impl Writer {
    fn word(&mut self, word: u64) {
        self.0.extend(word.to_le_bytes());
    }

    fn number(&mut self, number: usize) {
        self.word(number as u64);
    }

    fn pieces<'a>(&mut self, pieces: impl Iterator<Item = &'a Held> + Clone) {
        self.number(pieces.clone().count());
        for Held { kind, param, first, values } in pieces {
            let kind = match kind {
                Kind::Param => 0,
                Kind::Gradient => 1,
                Kind::State(index) => 2 + index,
            };
            [kind, param.0, *first, values.len()].into_iter().for_each(|number| self.number(number));
            values.iter().for_each(|value| self.word(value.to_bits()));
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn word(&mut self) -> u64 {
        let (word, rest) = self.0.split_first_chunk().expect(SAME_PROGRAM);
        self.0 = rest;
        u64::from_le_bytes(*word)
    }

    fn number(&mut self) -> usize {
        usize::try_from(self.word()).expect(SAME_PROGRAM)
    }

    fn float(&mut self) -> f64 {
        f64::from_bits(self.word())
    }

    fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.number()).map(|_| read(self)).collect()
    }

    fn held(&mut self) -> Held {
        let kind = match self.number() {
            0 => Kind::Param,
            1 => Kind::Gradient,
            state => Kind::State(state - 2),
        };
        let (param, first) = (ParamId(self.number()), self.number());
        Held { kind, param, first, values: self.list(Self::float) }
    }

    fn usage(&mut self) -> Usage {
        let [device, host] = [(); 2].map(|()| Bytes {
            live_bytes: [(); Category::COUNT].map(|()| self.number()),
            peak_bytes: [(); Category::COUNT].map(|()| self.number()),
            total_peak_bytes: self.number(),
        });
        Usage { device, host, allocations: self.word() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_results_round_trip_bitwise() {
        let held = |kind, values: &[f64]| Held { kind, param: ParamId(3), first: 7, values: values.to_vec() };
        let nan = f64::from_bits(0x7ff8_0000_0000_0123);
        let report = StepReport {
            loss: nan,
            targets: 5,
            grad_norm: -0.0,
            finite: false,
            state_finite: true,
            stop: false,
            sums: vec![0.5, nan],
            counts: vec![3, 0],
        };
        let mut usage = Usage { allocations: 9, ..Usage::default() };
        usage.device.add(Category::OptimizerState, 11);
        usage.host.add(Category::HostStaging, 13);
        let mut traffic = Traffic::default();
        let words = counts(&mut traffic).into_iter().flat_map(|(_, counts)| counts);
        words.zip(1..).for_each(|(word, number)| *word = number);
        let run = RankRun {
            reports: vec![report.clone(), StepReport { loss: 1.5, stop: true, ..report }],
            first: Pieces { values: vec![held(Kind::Param, &[1.0]), held(Kind::Gradient, &[nan, -0.0])] },
            last: Pieces { values: vec![held(Kind::State(2), &[f64::INFINITY]), held(Kind::Param, &[])] },
            traffic,
            settled: Usage::default(),
            usage,
        };
        let got = decode(&encode(&run));
        let bits = |run: &RankRun| -> Vec<[u64; 3]> {
            let of = |report: &StepReport| [report.loss, report.grad_norm, *report.sums.last().unwrap()];
            run.reports.iter().map(|report| of(report).map(f64::to_bits)).collect()
        };
        assert_eq!(bits(&got), bits(&run));
        assert_eq!(
            (got.reports[0].targets, got.reports[0].state_finite, got.reports[1].stop),
            (5, true, true)
        );
        assert_eq!((got.traffic, got.settled, got.usage), (run.traffic, run.settled, run.usage));
        assert_eq!(got.first.values.len(), 1, "only gradients of the first step are compared");
        for (got, want) in got
            .first
            .values
            .iter()
            .zip(&run.first.values[1..])
            .chain(got.last.values.iter().zip(&run.last.values))
        {
            assert_eq!((got.kind, got.param, got.first), (want.kind, want.param, want.first));
            let bits = |held: &Held| held.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(got), bits(want));
        }
    }
}

//! Compares predictions with measurements.

use std::collections::BTreeMap;

use fsdp_plan::Constants;
use fsdp_plan::cluster::ClusterError;
use rayon::prelude::*;
use serde::Serialize;

use crate::memory::PeakMemory;
use crate::recipe::INCOMPLETE;
use crate::row::Row;
use crate::run::Run;

/// The check of one row.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    /// The run.
    pub(crate) row: Row,
    /// The prediction of its step, or the reason for which the run is outside of the model.
    pub(crate) found: Result<Found, String>,
    /// Peak memory of a device, if the row states enough; also for runs that are outside.
    pub(crate) memory: Option<PeakMemory>,
}

/// The prediction of a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Found {
    /// Predicted seconds.
    pub(crate) seconds: f64,
    /// Measured seconds; `None` if the source does not state them.
    pub(crate) measured: Option<f64>,
    /// Shortest and longest expected seconds, for worlds so large that a single number would be too precise; else
    /// `None`.
    pub(crate) band: Option<[f64; 2]>,
    /// How values that are missing or not understood were interpreted.
    pub(crate) assumed: Vec<String>,
}

impl Checked {
    /// Relative error of the prediction, with its sign; `None` without a prediction and a measurement.
    pub(crate) fn error(&self) -> Option<f64> {
        let found = self.found.as_ref().ok()?;
        found.measured.map(|measured| found.seconds / measured - 1.0)
    }
}

/// Statistics of prediction errors, in percent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Errors {
    /// Number of runs.
    pub(crate) runs: usize,
    /// Mean absolute error.
    pub(crate) mean: f64,
    /// Median absolute error.
    pub(crate) median: f64,
    /// 90th percentile of absolute errors.
    pub(crate) p90: f64,
    /// Largest absolute error.
    pub(crate) worst: f64,
    /// Mean signed error.
    pub(crate) bias: f64,
}

impl Errors {
    /// Computes the statistics of errors given as fractions; `None` if there are none.
    pub(crate) fn of(errors: &[f64]) -> Option<Self> {
        let mut sizes: Vec<f64> = errors.iter().map(|error| 100.0 * error.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        let count = sizes.len();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / count as f64;
        (count > 0).then(|| Self {
            runs: count,
            mean: mean(&sizes),
            // For an even number, the mean of the two in the middle.
            median: (sizes[(count - 1) / 2] + sizes[count / 2]) / 2.0,
            p90: sizes[(count * 9 / 10).min(count - 1)],
            worst: sizes[count - 1],
            bias: 100.0 * mean(errors),
        })
    }
}

/// The check of all runs of a file.
#[derive(Clone, Debug)]
pub(crate) struct Check {
    /// The checks, row by row.
    pub(crate) rows: Vec<Checked>,
}

/// Predicts every run.
pub(crate) fn check(rows: &[Row], constants: &Constants) -> Check {
    let checked = |row: &Row| {
        let found = Run::of(row).and_then(Run::prepare).and_then(|prepared| {
            let failed = |error: ClusterError| error.to_string();
            let seconds = prepared.seconds(constants).map_err(failed)?;
            let band = prepared.band(constants).map_err(failed)?;
            let (measured, assumed) = (prepared.run.measured(), prepared.run.assumed);
            Ok(Found { seconds, measured, band, assumed })
        });
        Checked { row: row.clone(), found, memory: PeakMemory::of(row) }
    };
    Check { rows: rows.par_iter().map(checked).collect() }
}

impl Check {
    /// Errors of the runs that `which` selects.
    pub(crate) fn errors(&self, which: impl Fn(&Row) -> bool) -> Option<Errors> {
        let selected = self.rows.iter().filter(|checked| which(&checked.row));
        Errors::of(&selected.filter_map(Checked::error).collect::<Vec<_>>())
    }

    /// Errors of the runs grouped by `key`.
    pub(crate) fn by(&self, key: impl Fn(&Row) -> String) -> BTreeMap<String, Errors> {
        let keys: Vec<String> = self.rows.iter().map(|checked| key(&checked.row)).collect();
        let errors = |name: &String| Some((name.clone(), self.errors(|row| key(row) == *name)?));
        keys.iter().filter_map(errors).collect()
    }

    /// The mean over sources of their mean errors, in percent; sources count equally, however many runs they have.
    pub(crate) fn mean_over_sources(&self) -> Option<f64> {
        let means: Vec<f64> = self.by(project).values().map(|errors| errors.mean).collect();
        (!means.is_empty()).then(|| means.iter().sum::<f64>() / means.len() as f64)
    }

    /// Errors of peak memory, where it was measured.
    pub(crate) fn memory_errors(&self) -> Option<Errors> {
        let peaks = self.rows.iter().filter_map(|checked| checked.memory);
        Errors::of(&peaks.filter_map(|peak| peak.error()).collect::<Vec<_>>())
    }

    /// The number of runs for which it is both predicted and known whether they fit, and how many of these predictions
    /// are right.
    pub(crate) fn fitting(&self) -> (usize, usize) {
        let both = |checked: &Checked| checked.memory.and_then(|peak| peak.fits.zip(peak.fitted));
        let known: Vec<(bool, bool)> = self.rows.iter().filter_map(both).collect();
        (known.len(), known.iter().filter(|(fits, fitted)| fits == fitted).count())
    }

    /// Number of runs outside of the model, by reason; reasons do not include the columns that a row lacks.
    pub(crate) fn outside(&self) -> BTreeMap<&str, usize> {
        let mut reasons = BTreeMap::new();
        for checked in &self.rows {
            if let Err(reason) = &checked.found {
                let kind = if reason.starts_with(INCOMPLETE) { INCOMPLETE } else { reason };
                *reasons.entry(kind).or_default() += 1;
            }
        }
        reasons
    }
}

/// The project of a source: its first word; for papers, also the number.
pub(crate) fn project(row: &Row) -> String {
    let mut words = row.text("source").split([' ', ',']);
    match words.next().unwrap_or_default() {
        "arXiv" => format!("arXiv {}", words.next().unwrap_or_default()),
        first => first.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::read;

    const RUNS: &str = include_str!("../data/published.csv");
    const TPU_V4: &str = include_str!("../data/xla-fsdp-tpu-v4.csv");
    const H200: &str = include_str!("../data/h200-one-card.csv");

    #[test]
    fn errors_summarize_mean_median_p90_worst_and_bias() {
        let errors = Errors::of(&[0.1, -0.3, 0.0, 0.2]).unwrap();
        let Errors { runs, mean, median, p90, worst, bias } = errors;
        assert_eq!((runs, median, p90, worst), (4, 15.0, 30.0, 30.0));
        assert!((mean - 15.0).abs() < 1e-12 && bias.abs() < 1e-12, "{errors:?}");
        assert_eq!(Errors::of(&[]), None);
    }

    /// These runs were fitted: the test shows that constants, prices and reader are those of the fit, not how good they
    /// are.
    #[test]
    fn published_runs_are_predicted_with_fitted_constants() {
        let rows = read(RUNS, "published.csv").unwrap().rows;
        // Every seventh run, to cover all kinds.
        let some: Vec<Row> = rows.iter().step_by(7).cloned().collect();
        let check = check(&some, &Constants::fitted());
        let errors = check.errors(|_| true).unwrap();
        assert!(errors.runs >= 15 && errors.mean < 5.0, "{errors:?}");
        let inside = check.rows.iter().filter(|checked| checked.found.is_ok()).count();
        assert_eq!(inside + check.outside().values().sum::<usize>(), some.len());
    }

    #[test]
    fn xla_fsdp_table_is_predicted_without_fitting() {
        let rows = read(TPU_V4, "xla-fsdp-tpu-v4.csv").unwrap().rows;
        let errors = check(&rows, &Constants::fitted()).errors(|_| true).unwrap();
        assert!(errors.runs == 6 && errors.mean < 10.0, "{errors:?}");
    }

    #[test]
    fn one_card_runs_match_documented_error_without_fitting() {
        let rows = read(H200, "h200-one-card.csv").unwrap().rows;
        let errors = check(&rows, &Constants::fitted()).errors(|_| true).unwrap();
        assert!(
            errors.runs == 4 && (errors.mean - 11.3).abs() < 0.05,
            "docs/planning.md says 11.3: {errors:?}"
        );
    }

    #[test]
    fn impossible_sizes_give_reason_instead_of_panic() {
        let rows = RUNS.lines().next().unwrap().to_owned();
        let columns: Vec<&str> = rows.split(',').collect();
        let row = |changes: &[(&str, &str)]| {
            let value = |column: &&str| -> String {
                let change = changes.iter().find(|(name, _)| name == column).map(|(_, value)| *value);
                let usual = match *column {
                    "layers" => "2",
                    "hidden" => "64",
                    "heads" | "kv_heads" => "4",
                    "ffn" | "vocab" | "seq" => "128",
                    "micro_batch" | "row" => "1",
                    "devices" => "8",
                    "device_type" => "H100-80GB",
                    "sharding" => "fsdp2(zero3)",
                    "precision" => "bf16",
                    "act_ckpt" => "full",
                    "compile" => "yes",
                    "step_time_ms" => "10",
                    _ => "",
                };
                change.unwrap_or(usual).to_owned()
            };
            let line: Vec<String> = columns.iter().map(value).collect();
            let rows =
                read(&format!("{}\n{}\n", columns.join(","), line.join(",")), "runs.csv").unwrap().rows;
            check(&rows, &Constants::fitted()).rows.remove(0).found
        };
        assert!(row(&[]).is_ok());
        let reasons: [(&[(&str, &str)], &str); 11] = [
            (&[("kv_heads", "3")], "do not share"),
            (&[("heads", "3"), ("kv_heads", "3"), ("hidden", "63")], "cannot rotate"),
            (&[("layers", "1e9")], "layers = 1000000000"),
            (&[("vocab", "1e12")], "vocab = 1000000000000"),
            (&[("devices", "1e12")], "more than any run"),
            (&[("micro_batch", "1e9")], "more than any run"),
            (&[("micro_batch", "0.5")], "a micro-batch of 0.5 samples"),
            (&[("devices", "12"), ("sharding", "hsdp")], "a mesh impossible with 12 devices"),
            (&[("hidden", ""), ("act_ckpt", "-")], "incomplete configuration: no hidden, act_ckpt"),
            (&[("seq", "0")], "incomplete configuration: no seq"),
            (&[("sharding", "tp8")], "tensor, pipeline"),
        ];
        for (changes, expected) in reasons {
            let reason = row(changes).unwrap_err();
            assert!(reason.contains(expected), "{changes:?}: {reason}");
        }
        for sharding in ["none", "ddp", "zero1", "hsdp", "zero2", "xla_fsdp", "jax_fsdp4", "jax_fsdp+dcn_dp2"]
        {
            let Found { seconds, .. } =
                row(&[("sharding", sharding), ("global_batch_tokens", "1e9")]).unwrap();
            assert!(seconds.is_finite() && seconds > 0.0, "{sharding}");
        }
    }

    #[test]
    fn unknown_words_fall_back_to_usual_and_are_reported() {
        let text = "source,layers,hidden,heads,kv_heads,ffn,vocab,seq,micro_batch,devices,device_type,sharding,act_ckpt,precision,row\n\
            a,2,64,4,,128,128,128,1,1024,H100-80GB,unheard of,sometimes,int3,x\n\
            a,2,64,4,4,128,128,128,1,512,H100-80GB,FULL_SHARD,None,bf16,y\n";
        let check = check(&read(text, "runs.csv").unwrap().rows, &Constants::fitted());
        let [odd, usual] = &check.rows[..] else { panic!("two rows") };
        let [odd, usual] = [odd, usual].map(|checked| checked.found.as_ref().unwrap());
        assert_eq!(odd.assumed.len(), 5, "{:?}", odd.assumed);
        assert_eq!(usual.assumed.len(), 1, "the model has no name: {:?}", usual.assumed);
        let [shortest, longest] = odd.band.unwrap();
        assert!(shortest < odd.seconds && odd.seconds * 1.1 < longest && usual.band.is_none());
    }

    #[test]
    fn excluded_runs_have_reason() {
        let rows = read(RUNS, "published.csv").unwrap().rows;
        let reason = |id: i64| Run::of(rows.iter().find(|row| row.id() == id).unwrap()).unwrap_err();
        let tensor_parallel = rows.iter().find(|row| row.text("sharding").contains("tp8")).unwrap();
        assert_eq!(Run::of(tensor_parallel).unwrap_err(), "tensor, pipeline or context parallel");
        let lacking = reason(389);
        assert!(lacking.starts_with("incomplete configuration: no "), "{lacking}");
        assert_eq!(check(&rows, &Constants::fitted()).outside().get(INCOMPLETE).copied().unwrap_or(0), 31);
    }
}

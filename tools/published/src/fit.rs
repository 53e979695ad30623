//! Fits the constants of prices to published runs, and reports how well it predicts runs that were not fitted.
//!
//! The method is Gauss-Newton on logarithms of constants and of times. Weights of `1 / max(|error|, 3 %)` approximate
//! the least sum of absolute errors. The expected value of a constant ([`EXPECTED`]) is a prior whose strength follows
//! from its width. The runs of a project on one generation of devices together weigh at most as much as 40 runs.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;

use fsdp_plan::Constants;
use rayon::prelude::*;

use crate::check::{Errors, project};
use crate::expected::{EXPECTED, to_toml};
use crate::row::Row;
use crate::run::{Prepared, Run};

/// Where the product has the constants.
const FITTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../crates/fsdp-plan/constants.toml");

const ROUNDS: usize = 12;
/// Damping of a step, as a fraction of the diagonal.
const DAMPING: f64 = 0.03;
/// The largest change of a logarithm in a step.
const STEP_MAX: f64 = 0.4;
const GROUP_WEIGHT_MAX: f64 = 40.0;
/// The change of a logarithm for numerical derivatives.
const DELTA: f64 = 1e-3;

/// A run and its measured time.
struct Measured {
    prepared: Prepared,
    seconds: f64,
}

impl Measured {
    fn group(&self) -> &str {
        self.prepared.run.row.text("group")
    }

    /// Logarithm of the predicted over the measured time.
    fn residual(&self, constants: &Constants) -> f64 {
        let predicted = self.prepared.seconds(constants).expect("clusters of runs have a peak for bf16");
        (predicted / self.seconds).ln()
    }
}

fn constants_of(logarithms: &[f64]) -> Constants {
    let values = EXPECTED.iter().zip(logarithms);
    values.fold(Constants::fitted(), |constants, ((name, ..), value)| constants.with(name, value.exp()))
}

fn residuals(runs: &[&Measured], logarithms: &[f64]) -> Vec<f64> {
    let constants = constants_of(logarithms);
    runs.par_iter().map(|run| run.residual(&constants)).collect()
}

fn weights(runs: &[&Measured]) -> Vec<f64> {
    let key = |run: &Measured| (project(&run.prepared.run.row), run.prepared.run.cluster.generation.clone());
    let mut counts = BTreeMap::new();
    runs.iter().for_each(|run| *counts.entry(key(run)).or_insert(0.0) += 1.0);
    runs.iter().map(|run| (GROUP_WEIGHT_MAX / counts[&key(run)]).min(1.0)).collect()
}

/// Fits the constants to these runs.
fn fit(runs: &[&Measured], rounds: usize) -> Constants {
    let expected: Vec<f64> = EXPECTED.iter().map(|(_, value, ..)| value.ln()).collect();
    let base = weights(runs);
    let mut x = expected.clone();
    for _ in 0..rounds {
        let r = residuals(runs, &x);
        let columns: Vec<Vec<f64>> = (0..x.len())
            .map(|index| {
                let mut moved = x.clone();
                moved[index] += DELTA;
                let there = residuals(runs, &moved);
                there.iter().zip(&r).map(|(there, here)| (there - here) / DELTA).collect()
            })
            .collect();
        let w: Vec<f64> = base.iter().zip(&r).map(|(base, r)| base / r.abs().max(0.03)).collect();
        let dot = |one: &[f64], other: &[f64]| -> f64 {
            one.iter().zip(other).zip(&w).map(|((one, other), w)| one * other * w).sum()
        };
        let n = x.len();
        let mut a: Vec<Vec<f64>> =
            (0..n).map(|i| (0..n).map(|j| dot(&columns[i], &columns[j])).collect()).collect();
        let mut b = vec![0.0; n];
        for i in 0..n {
            let prior = 1.0 / EXPECTED[i].2.powi(2);
            a[i][i] += prior;
            a[i][i] *= 1.0 + DAMPING;
            b[i] = dot(&columns[i], &r) + prior * (x[i] - expected[i]);
        }
        let step = solve(a, b);
        x.iter_mut().zip(step).for_each(|(x, step)| *x -= step.clamp(-STEP_MAX, STEP_MAX));
    }
    constants_of(&x)
}

/// Solves `a x = b` for a positive definite `a`.
fn solve(mut a: Vec<Vec<f64>>, mut b: Vec<f64>) -> Vec<f64> {
    let n = b.len();
    for i in 0..n {
        for row in i + 1..n {
            let factor = a[row][i] / a[i][i];
            let (above, below) = a.split_at_mut(row);
            below[0].iter_mut().zip(&above[i]).for_each(|(value, pivot)| *value -= factor * pivot);
            b[row] -= factor * b[i];
        }
    }
    for i in (0..n).rev() {
        let known: f64 = (i + 1..n).map(|j| a[i][j] * b[j]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    b
}

fn errors(runs: &[&Measured], constants: &Constants) -> Vec<f64> {
    runs.par_iter().map(|run| run.residual(constants).exp() - 1.0).collect()
}

fn line(name: &str, errors: &[f64]) {
    if let Some(Errors { runs, mean, median, p90, worst, bias }) = Errors::of(errors) {
        println!("{name:32} {runs:4} {mean:6.2} {median:6.2} {p90:6.2} {worst:6.2} {bias:+6.2}");
    }
}

fn report(runs: &[&Measured], constants: &Constants) {
    println!(
        "{:32} {:>4} {:>6} {:>6} {:>6} {:>6} {:>6}",
        "errors in %", "runs", "mean", "median", "p90", "worst", "bias"
    );
    let all = errors(runs, constants);
    let of = |which: &dyn Fn(&Measured) -> bool| -> Vec<f64> {
        runs.iter().zip(&all).filter(|(run, _)| which(run)).map(|(_, error)| *error).collect()
    };
    let checkpointing = |run: &Measured| run.prepared.run.row.text("act_ckpt").to_owned();
    line("all", &all);
    line("without checkpointing", &of(&|run| checkpointing(run) == "none"));
    line("with full checkpointing", &of(&|run| checkpointing(run) == "full"));
    for key in [
        |run: &Measured| project(&run.prepared.run.row),
        |run: &Measured| run.prepared.run.cluster.name.clone(),
    ] {
        let keys: BTreeSet<String> = runs.iter().map(|run| key(run)).collect();
        keys.iter().for_each(|name| line(name, &of(&|run| key(run) == *name)));
    }
    let mut worst: Vec<(f64, &Measured)> = all.iter().copied().zip(runs.iter().copied()).collect();
    worst.sort_by(|one, other| other.0.abs().total_cmp(&one.0.abs()));
    for (error, run) in worst.iter().take(12) {
        let row = &run.prepared.run.row;
        let columns = [
            "row",
            "model",
            "devices",
            "device_type",
            "sharding",
            "precision",
            "act_ckpt",
            "compile",
            "seq",
            "micro_batch",
        ];
        let words: Vec<&str> = columns.iter().map(|column| row.text(column)).collect();
        println!("  {:+6.1} % {} {}", 100.0 * error, project(row), words.join(" "));
    }
}

fn cross_validate(runs: &[&Measured]) {
    let groups: BTreeSet<&str> = runs.iter().map(|run| run.group()).collect();
    let (mut all, mut kept) = (Vec::new(), Vec::new());
    let mut by_source: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for group in groups {
        let (out, rest): (Vec<&Measured>, Vec<&Measured>) = runs.iter().partition(|run| run.group() == group);
        let constants = fit(&rest, 6);
        for (run, error) in out.iter().zip(errors(&out, &constants)) {
            all.push(error);
            by_source.entry(project(&run.prepared.run.row)).or_default().push(error.abs());
            if run.prepared.run.row.text("act_ckpt") == "none" {
                kept.push(error);
            }
        }
    }
    println!("leaving out one group at a time:");
    line("all", &all);
    line("without checkpointing", &kept);
    let mean = |errors: &[f64]| errors.iter().sum::<f64>() / errors.len() as f64;
    let means: Vec<f64> = by_source.values().map(|errors| mean(errors)).collect();
    println!("mean over {} sources: {:.1} %", means.len(), 100.0 * mean(&means));
}

/// The runs that are measured and inside of the model, and how many are outside for each reason.
fn measured(rows: &[Row]) -> (Vec<Measured>, BTreeMap<String, usize>) {
    let prepared: Vec<Result<Prepared, String>> =
        rows.par_iter().map(|row| Run::of(row).and_then(Run::prepare)).collect();
    let mut outside: BTreeMap<String, usize> = BTreeMap::new();
    let mut measured = Vec::new();
    for prepared in prepared {
        match prepared {
            Err(reason) => *outside.entry(reason).or_default() += 1,
            Ok(prepared) => {
                let seconds = prepared.run.measured();
                // The table of the TPU v4 report is shown separately, because most of its shapes are assumed.
                let is_fitted = !prepared.run.row.text("source").contains("PyTorch/XLA FSDP");
                measured.extend(seconds.filter(|_| is_fitted).map(|seconds| Measured { prepared, seconds }));
            }
        }
    }
    (measured, outside)
}

/// Fits the constants to these rows and prints the errors; also of groups of runs left out, and into the product's
/// file, if asked to.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn run(rows: &[Row], leaves_out: bool, writes: bool) -> Result<(), Box<dyn Error>> {
    let (measured, outside) = measured(rows);
    let runs: Vec<&Measured> = measured.iter().collect();
    println!("{} rows, {} measured and inside; outside: {outside:?}", rows.len(), runs.len());
    let constants = fit(&runs, ROUNDS);
    for (name, expected, ..) in EXPECTED {
        println!("{name:24} {:12.5} expected {expected}", constants.get(name));
    }
    report(&runs, &constants);
    if leaves_out {
        cross_validate(&runs);
    }
    if writes {
        fs::write(FITTED, to_toml(&constants))?;
    }
    Ok(())
}

//! Runs in the folder format of `MLflow` (mlflow/store/tracking/file_store.py): `mlruns/0/RUN/` with `meta.yaml`, a
//! file of lines `MILLISECONDS VALUE STEP` for each metric, and a file with the value of each parameter and tag.
//!
//! A resumed run keeps its id, and its metrics lose the steps that are repeated.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::sink::{Figure, Sink};
use crate::atomic_file;

/// Name of the folder, in the output folder; `mlflow ui --backend-store-uri` takes its path.
pub(crate) const MLFLOW: &str = "mlruns";

/// The default experiment of `MLflow`.
const EXPERIMENT: &str = "0";

/// Status of a run in progress.
const RUNNING: u8 = 1;

/// Status of a run that has ended.
const FINISHED: u8 = 3;

/// A run that is being written.
pub(super) struct Run {
    folder: PathBuf,
    name: String,
    /// Start time, in milliseconds since 1970.
    start_ms: u128,
    /// Files of the metrics so far, by name.
    metrics: BTreeMap<String, File>,
}

impl Run {
    /// Continues the run of an output folder, or creates one; `parameters` are the keys and values of the run file.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn begin(out_dir: &Path, parameters: &[(String, String)]) -> io::Result<Self> {
        let (root, start_ms) = (out_dir.join(MLFLOW), now_ms());
        let experiment = root.join(EXPERIMENT);
        fs::create_dir_all(&experiment)?;
        let artifacts = fs::canonicalize(&experiment)?;
        let meta = format!(
            "artifact_location: file://{}\ncreation_time: {start_ms}\nexperiment_id: '{EXPERIMENT}'\n\
             last_update_time: {start_ms}\nlifecycle_stage: active\nname: Default\n",
            artifacts.display()
        );
        atomic_file::replace(&experiment.join("meta.yaml"), meta.as_bytes())?;
        let id = match runs(&experiment)?.pop() {
            Some(existing) => existing,
            None => format!("{:032x}", start_ms << 32 | u128::from(std::process::id())),
        };
        let name = out_dir.file_name().map_or_else(|| id.clone(), |name| name.to_string_lossy().into_owned());
        let run = Self { folder: experiment.join(id), name, start_ms, metrics: BTreeMap::new() };
        for folder in ["metrics", "params", "tags", "artifacts"] {
            fs::create_dir_all(run.folder.join(folder))?;
        }
        for (key, value) in parameters {
            atomic_file::replace(&run.folder.join("params").join(key), value.as_bytes())?;
        }
        atomic_file::replace(&run.folder.join("tags/mlflow.runName"), run.name.as_bytes())?;
        run.write_meta(RUNNING, None)?;
        Ok(run)
    }

    fn write_meta(&self, status: u8, end_ms: Option<u128>) -> io::Result<()> {
        let folder = fs::canonicalize(&self.folder)?;
        let id = self.folder.file_name().unwrap_or_default().to_string_lossy();
        let end_ms = end_ms.map_or("null".to_owned(), |end| end.to_string());
        // In single-quoted YAML, single quotes are doubled.
        let name = self.name.replace('\'', "''");
        let meta = format!(
            "artifact_uri: file://{}/artifacts\nend_time: {end_ms}\nentry_point_name: ''\n\
             experiment_id: '{EXPERIMENT}'\nlifecycle_stage: active\nrun_id: {id}\nrun_name: '{name}'\nrun_uuid: {id}\n\
             source_name: ''\nsource_type: 4\nsource_version: ''\nstart_time: {}\nstatus: {status}\ntags: []\nuser_id: ''\n",
            folder.display(),
            self.start_ms
        );
        atomic_file::replace(&self.folder.join("meta.yaml"), meta.as_bytes()).map(drop)
    }

    fn write(&mut self, step: u64, metric: String, value: f64) -> io::Result<()> {
        let line = format!("{} {value} {step}\n", now_ms());
        let file = match self.metrics.get_mut(&metric) {
            Some(file) => file,
            None => {
                let path = self.folder.join("metrics").join(&metric);
                path.parent().map_or(Ok(()), fs::create_dir_all)?;
                let file = OpenOptions::new().append(true).create(true).open(path)?;
                self.metrics.entry(metric).or_insert(file)
            }
        };
        file.write_all(line.as_bytes())
    }
}

impl Sink for Run {
    fn path(&self) -> &Path {
        &self.folder
    }

    fn step(&mut self, step: u64, figures: &[Figure]) -> io::Result<()> {
        figures.iter().try_for_each(|figure| self.write(step, figure.name.clone(), figure.value))
    }

    fn evaluation(&mut self, step: u64, set: &str, figures: &[Figure]) -> io::Result<()> {
        figures.iter().try_for_each(|figure| self.write(step, format!("{}/{set}", figure.name), figure.value))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // If this fails, only the end of the run is not recorded; all metrics are.
        let _ = self.write_meta(FINISHED, Some(now_ms()));
    }
}

fn now_ms() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()
}

/// Returns the names of the runs of an experiment.
fn runs(experiment: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(experiment)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort();
    Ok(names)
}

/// Removes steps after `step` from all metrics of an output folder, if there are any.
///
/// # Errors
/// If a file cannot be read or replaced.
pub(super) fn cut(out_dir: &Path, step: u64) -> io::Result<()> {
    let (root, experiment) = (out_dir.join(MLFLOW), out_dir.join(MLFLOW).join(EXPERIMENT));
    if step == 0 && root.exists() {
        return fs::remove_dir_all(root);
    }
    if !experiment.exists() {
        return Ok(());
    }
    for run in runs(&experiment)? {
        let metrics = experiment.join(run).join("metrics");
        if metrics.exists() {
            cut_folder(&metrics, step)?;
        }
    }
    Ok(())
}

/// Removes steps from the metrics in a folder and its subfolders.
fn cut_folder(folder: &Path, step: u64) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let (path, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        if kind.is_dir() {
            cut_folder(&path, step)?;
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let is_kept = |line: &&str| {
            let number = line.strip_suffix('\n').and_then(|line| line.split(' ').nth(2)?.parse().ok());
            number.is_some_and(|done: u64| done <= step)
        };
        let kept: usize = text.split_inclusive('\n').take_while(is_kept).map(str::len).sum();
        if kept < text.len() {
            atomic_file::replace(&path, &text.as_bytes()[..kept])?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::sink::figures;
    use crate::metrics::tests::{full, metrics};

    fn parameters() -> Vec<(String, String)> {
        vec![("train.steps".to_owned(), "5".to_owned())]
    }

    /// Returns the value and step of each line of a metric of the only run.
    fn lines(out_dir: &Path, metric: &str) -> Vec<(f64, u64)> {
        let experiment = out_dir.join(MLFLOW).join(EXPERIMENT);
        let run = experiment.join(runs(&experiment).unwrap().pop().unwrap());
        let text = fs::read_to_string(run.join("metrics").join(metric)).unwrap();
        let parsed = text.lines().map(|line| {
            let parts: Vec<&str> = line.split(' ').collect();
            assert!(parts.len() == 3 && parts[0].parse::<u64>().unwrap() > 1_500_000_000_000, "{line}");
            (parts[1].parse().unwrap(), parts[2].parse().unwrap())
        });
        parsed.collect()
    }

    #[test]
    fn run_folder_has_files_mlflow_reads() {
        let dir = tempfile::tempdir().unwrap();
        let out_dir = dir.path().join("it's a run");
        let mut run = Run::begin(&out_dir, &parameters()).unwrap();
        run.step(1, &figures(&full(1))).unwrap();
        let nan = [Figure { name: "eval_loss".to_owned(), value: f64::NAN }];
        run.evaluation(1, "books", &nan).unwrap();
        let folder = run.folder.clone();
        let meta = fs::read_to_string(folder.join("meta.yaml")).unwrap();
        assert!(meta.contains("status: 1\n") && meta.contains("end_time: null\n"), "{meta}");
        assert!(meta.contains("run_name: 'it''s a run'\n"), "{meta}");
        let id = folder.file_name().unwrap().to_str().unwrap().to_owned();
        assert!(id.len() == 32 && meta.contains(&format!("run_id: {id}\n")), "{meta}");
        drop(run);
        let meta = fs::read_to_string(folder.join("meta.yaml")).unwrap();
        assert!(meta.contains("status: 3\n") && !meta.contains("null"), "{meta}");
        assert_eq!(lines(&out_dir, "loss"), [(5.5, 1)]);
        assert_eq!(lines(&out_dir, "expert_imbalance"), [(2.0, 1)]);
        assert!(lines(&out_dir, "eval_loss/books")[0].0.is_nan());
        assert_eq!(fs::read_to_string(folder.join("params/train.steps")).unwrap(), "5");
        let experiment = fs::read_to_string(folder.with_file_name("meta.yaml")).unwrap();
        assert!(experiment.contains("experiment_id: '0'\n"), "{experiment}");
    }

    #[test]
    fn resume_keeps_run_and_cuts_later_steps_and_partial_lines() {
        let dir = tempfile::tempdir().unwrap();
        let write = |from: u64, steps: std::ops::RangeInclusive<u64>| {
            cut(dir.path(), from).unwrap();
            let mut run = Run::begin(dir.path(), &parameters()).unwrap();
            steps.for_each(|step| run.step(step, &figures(&metrics(step, None))).unwrap());
            run.folder.clone()
        };
        let folder = write(0, 1..=5);
        assert_eq!(write(2, 3..=4), folder);
        let steps = |out: &[(f64, u64)]| out.iter().map(|&(_, step)| step).collect::<Vec<_>>();
        assert_eq!(steps(&lines(dir.path(), "lr")), [1, 2, 3, 4]);
        let path = folder.join("metrics/lr");
        fs::write(&path, fs::read_to_string(&path).unwrap() + "17 1.0").unwrap();
        write(9, 5..=5);
        assert_eq!(steps(&lines(dir.path(), "lr")), [1, 2, 3, 4, 5]);
        cut(dir.path(), 0).unwrap();
        assert!(!dir.path().join(MLFLOW).exists());
    }
}

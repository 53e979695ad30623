use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use super::*;

fn folder(lines: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a run");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("metrics.jsonl"), lines).unwrap();
    (dir, path)
}

fn missing() -> Result<Step, CliError> {
    Err(CliError::Input("gone".to_owned()))
}

#[test]
fn unfinished_run_is_read_up_to_incomplete_line() {
    let (_dir, path) = folder(
        "{\"start\":{\"version\":\"0.1.0\",\"after_step\":0,\"ranks\":2,\"transport\":\"threads\",\"processes\":[]}}\n\
         {\"step\":1,\"loss\":5.5,\"lr\":0.1,\"slowest_rank\":1}\n\
         {\"step\":1,\"set\":\"books\",\"eval_loss\":5.0,\"eval_perplexity\":null,\"eval_tokens\":3}\n\
         {\"step\":2,\"loss\":null,\"lr\":0.1,\"slowest_rank\":1}\n{\"step\":3,\"lo",
    );
    fs::write(path.join("resolved.toml"), "[train]\nsteps = 9").unwrap();
    let run = Record::read(&path).unwrap();
    assert_eq!((run.steps, run.planned(), run.unread), (2, Some(9), 1));
    assert_eq!(run.column("lr"), [(1.0, 0.1), (2.0, 0.1)]);
    assert!(run.column("loss")[1].1.is_nan(), "null is a number that is not finite");
    assert_eq!(run.column("grad_norm"), []);
    assert_eq!(run.evaluations["books"].loss, [(1.0, 5.0)]);
    assert!(run.evaluations["books"].perplexity[0].1.is_nan());
    assert_eq!(run.slowest.into_iter().collect::<Vec<_>>(), [(1, 2)]);
    let html = render(&[Record::read(&path).unwrap()], vec![missing()]).finish("t");
    assert!(html.contains("2 of 9 (running, or stopped)") && html.contains("not finite"), "{html}");
    assert!(html.contains("1 line of metrics.jsonl cannot be read"));
}

#[test]
fn missing_metrics_error_names_file() {
    let dir = tempfile::tempdir().unwrap();
    let error = Record::read(dir.path()).unwrap_err();
    assert!(error.to_string().contains("metrics.jsonl"), "{error}");
    assert_eq!(error.exit().code(), 2);
}

#[test]
fn runs_are_overlaid_in_distinct_colors() {
    let lines = |loss: f64| {
        let mut text = String::new();
        for step in 1..=3 {
            let _ = writeln!(text, "{{\"step\":{step},\"loss\":{loss}}}");
        }
        text
    };
    let ((_a, a), (_b, b)) = (folder(&lines(2.0)), folder(&lines(3.0)));
    let runs = [Record::read(&a).unwrap(), Record::read(&b).unwrap()];
    let html = render(&runs, vec![missing(), missing()]).finish("t");
    assert!(html.contains("class=\"line c0\"") && html.contains("class=\"line c1\""));
    assert!(html.contains("No run was evaluated") && html.contains("neither is available"));
    assert!(!html.contains("<h3>Gradient norm</h3>"), "what no run has is not drawn");
}

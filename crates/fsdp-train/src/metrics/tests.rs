use std::time::Duration;

use serde_json::json;

use super::file::{MetricsFile, lines};
use super::*;

/// Returns the text that is written to an empty file.
fn written(write: impl FnOnce(&mut MetricsFile)) -> String {
    let dir = tempfile::tempdir().unwrap();
    write(&mut MetricsFile::resume(dir.path(), 0).unwrap());
    std::fs::read_to_string(dir.path().join(METRICS)).unwrap()
}

pub(super) fn metrics(step: u64, utilization: Option<Utilization>) -> StepMetrics {
    StepMetrics {
        step,
        loss: 5.5,
        grad_norm: 1.25,
        lr: 3e-4,
        tokens: 2048,
        targets: 2000,
        tokens_per_s: 1000.5,
        step_ms: 2047.0,
        scaling: None,
        utilization,
        waiting: None,
        parts: None,
        experts: None,
    }
}

/// Returns a step with all figures.
pub(super) fn full(step: u64) -> StepMetrics {
    let waiting = Waiting::of(step, &[Duration::ZERO]);
    StepMetrics {
        scaling: Some(Scaling { loss_scale: 1024.0, skipped: false }),
        waiting: Some(waiting),
        parts: Some(LossParts {
            cross_entropy: 5.0,
            z_loss: Some(0.25),
            router_loss: Some(0.25),
            router_z_loss: Some(0.125),
            router_sequence_loss: Some(0.5),
        }),
        experts: ExpertLoads::of(vec![vec![3, 1], vec![4, 0]]),
        ..metrics(step, Some(Utilization { mfu: 0.5, mfu_6n: 0.25 }))
    }
}

#[test]
fn step_line_includes_loss_parts_and_expert_tokens() {
    let text = written(|file| file.write(&full(1)).unwrap());
    let expected = r#""cross_entropy":5.0,"z_loss":0.25,"router_loss":0.25,"router_z_loss":0.125,"router_sequence_loss":0.5,"expert_imbalance":2.0,"idle_experts":1,"expert_tokens":[[3,1],[4,0]]}"#;
    assert!(text.trim_end().ends_with(expected), "{text}");
}

#[test]
fn step_line_is_one_object_with_fixed_key_order() {
    let text = written(|file| {
        file.write(&metrics(1, None)).unwrap();
        file.write(&metrics(2, Some(Utilization { mfu: 0.5, mfu_6n: 0.25 }))).unwrap();
    });
    let common = r#""loss":5.5,"grad_norm":1.25,"lr":0.0003,"tokens":2048,"targets":2000,"tokens_per_s":1000.5,"step_ms":2047.0"#;
    let expected = format!("{{\"step\":1,{common}}}\n{{\"step\":2,{common},\"mfu\":0.5,\"mfu_6n\":0.25}}\n");
    assert_eq!(text, expected);
}

fn process_table() -> ProcessTable {
    let process = |first_rank, host: &str| ProcessInfo {
        host: host.to_owned(),
        pid: 7,
        device: "cpu".to_owned(),
        cpu: "Z".to_owned(),
        first_rank,
        ranks: 2,
    };
    ProcessTable { transport: "TCP".to_owned(), processes: vec![process(0, "n1"), process(2, "n2")] }
}

#[test]
fn start_line_lists_processes() {
    let text = written(|file| file.start(3, &process_table()).unwrap());
    let process = |first_rank: usize, host: &str| json!({ "host": host, "pid": 7, "device": "cpu", "cpu": "Z", "first_rank": first_rank, "ranks": 2 });
    let processes = [process(0, "n1"), process(2, "n2")];
    let version = env!("CARGO_PKG_VERSION");
    let start = json!({ "version": version, "after_step": 3, "ranks": 4, "transport": "TCP", "processes": processes });
    assert!(text.ends_with("}\n") && text.lines().count() == 1, "{text}");
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(line, json!({ "start": start }));
    let alone = ProcessTable::alone("cpu", 3);
    let this = &alone.processes[0];
    assert_eq!((&*alone.transport, alone.processes.len(), this.ranks), ("threads", 1, 3));
    assert_eq!(this.pid, std::process::id());
}

#[test]
fn rank_with_least_waiting_is_slowest() {
    let waiting = Waiting::of(4, &[30, 10, 20].map(Duration::from_millis));
    let expected =
        Waiting { wait_step: 4, wait_ms: 20.0, wait_ms_max: 30.0, wait_ms_min: 10.0, slowest_rank: 1 };
    assert_eq!(waiting, expected);
    let text =
        written(|file| file.write(&StepMetrics { waiting: Some(waiting), ..metrics(5, None) }).unwrap());
    let columns = r#""wait_step":4,"wait_ms":20.0,"wait_ms_max":30.0,"wait_ms_min":10.0,"slowest_rank":1}"#;
    assert!(text.trim_end().ends_with(columns), "{text}");
}

#[test]
fn start_lines_are_not_steps_and_are_cut_with_later_steps() {
    let start = written(|file| file.start(0, &process_table()).unwrap());
    let text = [&start, &line(1), &line(2), &start, &line(3), &start].map(String::as_str).concat();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    for (step, kept) in [(0, 0), (1, 2), (2, 3), (3, 5), (9, 5)] {
        std::fs::write(&path, &text).unwrap();
        assert_eq!(last_step(&path).unwrap(), Some(3));
        drop(MetricsFile::resume(dir.path(), step).unwrap());
        let expected: String = text.lines().take(kept).map(|line| format!("{line}\n")).collect();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected, "{step}");
    }
}

fn evaluation(step: u64, set: &str) -> EvalMetrics {
    EvalMetrics::of(step, &Evaluation { set: set.to_owned(), loss: 0.0, targets: 7 })
}

#[test]
fn evaluation_line_names_its_set() {
    let text = written(|file| assert!(file.evaluation(&evaluation(3, "books")).unwrap()));
    let expected =
        r#"{"step":3,"set":"books","eval_loss":0.0,"eval_perplexity":1.0,"eval_tokens":7}"#.to_owned();
    assert_eq!(text, expected + "\n");
    let overflowing = EvalMetrics::of(1, &Evaluation { set: "a".to_owned(), loss: 1e3, targets: 1 });
    assert!(
        written(|file| assert!(file.evaluation(&overflowing).unwrap())).contains(r#""eval_perplexity":null"#)
    );
}

#[test]
fn evaluation_is_cut_with_its_step_and_never_duplicated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    let resumed = |step| MetricsFile::resume(dir.path(), step).unwrap();
    let mut file = resumed(0);
    for step in 1..=2 {
        file.write(&metrics(step, None)).unwrap();
        file.evaluation(&evaluation(step, "a")).unwrap();
    }
    assert!(file.evaluation(&evaluation(2, "b")).unwrap());
    assert!(!file.evaluation(&evaluation(2, "b")).unwrap(), "it is there");
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 5, "{text}");
    let lacks = |file: &MetricsFile, step| file.lacks_evaluation(step, ["a", "b"].into_iter());
    let file = resumed(2);
    assert!(!lacks(&file, 2));
    assert!(!file.lacks_evaluation(1, ["c"].into_iter()), "an earlier step has gone by");
    let mut file = resumed(1);
    assert!(lacks(&file, 1));
    for set in ["a", "b"] {
        file.evaluation(&evaluation(1, set)).unwrap();
    }
    let expected: String = text.lines().take(2).map(|line| format!("{line}\n")).collect();
    let expected = expected + &written(|file| assert!(file.evaluation(&evaluation(1, "b")).unwrap()));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
}

#[test]
fn non_finite_loss_is_null() {
    let text = written(|file| file.write(&StepMetrics { loss: f64::NAN, ..metrics(1, None) }).unwrap());
    assert!(text.contains("\"loss\":null"));
}

#[test]
fn every_line_reaches_file_immediately() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    let mut writer = MetricsFile::resume(folder.path(), 0).unwrap();
    for lines in 1..=3 {
        writer.write(&metrics(lines, None)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count() as u64, lines);
    }
}

#[test]
fn mfu_6n_matches_hand_calculation() {
    let (parameter_count, trained_count) = (1_000_000, 1_000_000);
    let flops =
        FlopModel { parameter_count, trained_count, layer_count: 4, attention_width: 256, seq_len: 256 };
    assert_eq!(flops.flops_per_token_6n(), 6e6);
    assert_eq!(flops.flops_per_token(), 6e6 + 12.0 * 4.0 * 256.0 * 256.0);
    // 6e6 FLOPs per token at 1e6 tokens/s are 6 TFLOP/s, of 4 ranks with 3 each.
    let utilization = flops.utilization(1e6, 4, 3.0);
    assert!((utilization.mfu_6n - 0.5).abs() < 1e-15);
    assert!(utilization.mfu > utilization.mfu_6n);
}

/// Returns the steps of a file that contained `before`, was resumed at `step`, and then received the next step.
fn resumed(before: &[u8], step: u64) -> Vec<u64> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    std::fs::write(&path, before).unwrap();
    MetricsFile::resume(dir.path(), step).unwrap().write(&metrics(step + 1, None)).unwrap();
    let text = std::fs::read(&path).unwrap();
    let steps: Vec<(u64, usize)> = lines(&text).collect();
    assert_eq!(steps.last().unwrap().1, text.len(), "every line is one of a step");
    assert_eq!(last_step(&path).unwrap(), Some(step + 1));
    steps.into_iter().map(|(step, _)| step).collect()
}

fn line(step: u64) -> String {
    format!("{{\"step\":{step},\"loss\":1.0}}\n")
}

#[test]
fn resume_cuts_later_steps_and_incomplete_lines() {
    let all = (1..=5).map(line).collect::<String>();
    assert_eq!(resumed(all.as_bytes(), 3), [1, 2, 3, 4]);
    assert_eq!(resumed(all.as_bytes(), 5), [1, 2, 3, 4, 5, 6]);
    assert_eq!(resumed(all.as_bytes(), 0), [1]);
    assert_eq!(resumed(format!("{all}{{\"step\":6,\"lo").as_bytes(), 9), [1, 2, 3, 4, 5, 10]);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    assert_eq!(last_step(&path).unwrap(), None);
    drop(MetricsFile::resume(dir.path(), 3).unwrap());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "");
    assert_eq!(last_step(&path).unwrap(), Some(0));
}

#[test]
fn damaged_line_is_cut_with_everything_after_it() {
    let text = (1..=5).map(line).collect::<String>().into_bytes();
    let third = 2 * line(1).len()..3 * line(1).len();
    // Bytes that are not UTF-8, and bytes that end the JSON.
    for byte in [0xff, 0xc3, 0x00, b'}'] {
        let mut damaged = text.clone();
        damaged[third.start + 10] = byte;
        assert_eq!(resumed(&damaged, 5), [1, 2, 6], "{byte:#x}");
    }
}

#[test]
fn directory_in_place_of_metrics_file_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(METRICS);
    std::fs::create_dir(&path).unwrap();
    let error = MetricsFile::resume(dir.path(), 1).err().unwrap().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

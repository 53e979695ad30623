//! Observability of a run: the log, the forms of its metrics, and reports on them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Ran, Sandbox};

/// A run with evaluations and checkpoints.
const RUN: &str = "train run.toml --set data.eval=[\"data.txt\"] --set data.eval_every=2 --set checkpoint.every=2 \
                   --set train.steps=4";

fn logged(sandbox: &Sandbox, filter: &str, args: &str) -> Ran {
    let mut command = sandbox.command();
    Ran::of(command.env("RUST_LOG", filter).args(args.split_whitespace()).output().unwrap())
}

/// Returns the lines of stderr, each of which must be a JSON object.
fn objects(ran: &Ran) -> Vec<Value> {
    let read = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    ran.stderr.lines().map(read).collect()
}

fn messages(ran: &Ran) -> Vec<String> {
    let message = |line: Value| line["fields"]["message"].as_str().map(str::to_owned);
    objects(ran).into_iter().map(|line| message(line).expect("every line has a message")).collect()
}

/// Returns the first line with a message.
fn line(ran: &Ran, message: &str) -> Value {
    let found = objects(ran).into_iter().find(|line| line["fields"]["message"] == message);
    found.unwrap_or_else(|| panic!("no `{message}` in {}", ran.stderr))
}

#[test]
fn log_contains_all_run_events() {
    let sandbox = Sandbox::new();
    let ran = logged(&sandbox, "fsdp=debug", RUN);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    for event in [
        "start version=",
        "plan parameters=",
        "predicted memory of a rank device_bytes=",
        "category=\"optimizer state\"",
        "training data samples=16",
        "evaluation data set=\"eval\"",
        "step step=1 loss=5.",
        "evaluation begins step=2",
        "evaluation step=2 set=\"eval\"",
        "checkpoint begun step=2",
        "checkpoint committed step=2",
        "model exported path=out/model",
    ] {
        assert!(ran.stderr.contains(event), "`{event}` is not in {}", ran.stderr);
    }
    let info = logged(&Sandbox::new(), "fsdp=info", RUN);
    assert!(
        info.stderr.contains("checkpoint committed") && !info.stderr.contains(" DEBUG "),
        "{}",
        info.stderr
    );
    let resumed = logged(&sandbox, "fsdp=info", &format!("{RUN} --resume --set train.steps=5"));
    assert!(
        resumed.stderr.contains("resuming step=4 path=out/checkpoints/step-00000004"),
        "{}",
        resumed.stderr
    );
}

#[test]
fn json_log_lines_are_objects_with_named_fields() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed(&format!("{RUN} --log-format json"));
    let plan = line(&ran, "plan");
    assert_eq!(
        (&plan["level"], &plan["fields"]["mesh"]),
        (&"INFO".into(), &"1 x 2 (replicate x shard)".into()),
        "{plan}"
    );
    let evaluation = line(&ran, "evaluation");
    let loss = sandbox.evaluations("out")[0].2;
    assert_eq!(evaluation["fields"]["loss"].as_f64(), Some(loss), "{evaluation}");
    assert_eq!(line(&ran, "training")["fields"]["loss"].as_f64(), Some(sandbox.column("out", "loss")[0]));
    let logged = messages(&ran);
    assert!(!logged.iter().any(|message| message.starts_with("checkpoint after step")), "{logged:?}");
    assert!(logged.contains(&"checkpoint committed".to_owned()), "{logged:?}");
    // Errors and warnings are JSON lines too.
    let failed = sandbox.fsdp("train absent.toml --log-format json");
    assert_eq!(failed.code, Some(2));
    let errors = objects(&failed);
    assert_eq!(errors.len(), 1, "{}", failed.stderr);
    assert_eq!(errors[0]["level"], "ERROR");
    assert!(errors[0]["fields"]["message"].as_str().unwrap().contains("absent.toml"));
}

#[test]
fn quiet_run_prints_only_summary_and_warnings() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed(&format!("{RUN} --quiet"));
    assert_eq!(ran.stderr, "");
    assert!(ran.stdout.contains("last evaluation"), "{}", ran.stdout);
    let warned = sandbox
        .succeed("train run.toml -q --overwrite --set train.lr_schedule.warmup_steps=9 --log-format json");
    let lines = objects(&warned);
    assert!(lines.iter().all(|line| line["level"] == "WARN"), "{}", warned.stderr);
    assert!(messages(&warned)[0].contains("the run ends within its warm-up"), "{}", warned.stderr);
}

const SINKS: &str = "--set run.metrics=[\"tensorboard\",\"csv\"]";

#[test]
fn csv_and_tensorboard_resume_without_duplicate_steps() {
    let sandbox = Sandbox::new();
    sandbox.succeed(&format!("{RUN} {SINKS}"));
    let rows = |name: &str| -> Vec<String> { sandbox.read(name).lines().map(str::to_owned).collect() };
    let (steps, evaluations) = (rows("out/metrics.csv"), rows("out/evaluations.csv"));
    assert_eq!((steps.len(), evaluations.len()), (5, 3), "{steps:?} {evaluations:?}");
    assert!(steps[1].starts_with(&format!("1,{},", sandbox.column("out", "loss")[0])), "{}", steps[1]);
    assert!(evaluations[2].starts_with("4,eval,"), "{}", evaluations[2]);
    std::fs::remove_dir_all(sandbox.path("out/checkpoints/step-00000004")).unwrap();
    sandbox.succeed(&format!("{RUN} {SINKS} --resume"));
    let numbers = |rows: &[String]| -> Vec<String> {
        rows.iter().map(|row| row.split(',').next().unwrap().to_owned()).collect()
    };
    assert_eq!(numbers(&rows("out/metrics.csv")), numbers(&steps));
    assert_eq!(rows("out/evaluations.csv"), evaluations);
    assert_eq!(sandbox.files("out/tensorboard").len(), 2, "one for each start");
    // A run that replaces this one removes its figures.
    sandbox.succeed("train run.toml --overwrite");
    assert!(!sandbox.path("out/metrics.csv").exists() && sandbox.files("out/tensorboard").is_empty());
}

#[test]
fn unwritable_metrics_file_is_named_and_stops_run() {
    let sandbox = Sandbox::new();
    std::fs::create_dir_all(sandbox.path("out")).unwrap();
    std::fs::create_dir(sandbox.path("out/metrics.csv")).unwrap();
    let ran = sandbox.fsdp(&format!("{RUN} {SINKS} --overwrite"));
    assert!(ran.code != Some(0) && ran.stderr.contains("out/metrics.csv"), "{}", ran.stderr);
}

#[test]
fn prometheus_metrics_are_served_during_run() {
    let sandbox = Sandbox::new();
    let args =
        "train run.toml --set train.steps=1000000 --set run.metrics_listen=\"127.0.0.1:0\" --log-format json";
    let mut child = sandbox
        .command()
        .args(args.split_whitespace())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let objects = lines.by_ref().map(|line| serde_json::from_str::<Value>(&line).unwrap());
    let mut fields = objects.map(|line| line["fields"].clone());
    let listening = fields.by_ref().find(|fields| fields["message"] == "serving metrics");
    let address = listening.expect("the run begins")["address"].as_str().unwrap().to_owned();
    fields.find(|fields| fields["message"] == "training").expect("the first step is told");
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(answer.contains("\nfsdp_steps 1000000\n") && answer.contains("\nfsdp_loss 5."), "{answer}");
}

#[test]
fn metrics_address_in_use_is_warning() {
    let sandbox = Sandbox::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let ran = sandbox.succeed(&format!("train run.toml --set run.metrics_listen=\"{address}\""));
    let warning = format!("metrics are not served at run.metrics_listen = \"{address}\"");
    assert!(ran.stderr.contains(&warning), "{}", ran.stderr);
}

#[test]
fn report_compares_several_runs() {
    let sandbox = Sandbox::new();
    sandbox.succeed(RUN);
    sandbox.succeed(&format!("{RUN} --set run.out_dir=other --set train.optimizer.lr=0.01"));
    let ran = sandbox.succeed("report out other");
    assert_eq!(ran.stdout, "report.html\n");
    let html = sandbox.read("report.html");
    for part in [
        "<h3>Training loss</h3>",
        "<h3>Evaluation loss</h3>",
        "<h3>Perplexity</h3>",
        "<h3>Learning rate</h3>",
        "<h3>Speed</h3>",
        "<h3>Waiting per step</h3>",
        "<h3>Memory of rank 0, predicted peaks</h3>",
        "<h3>out: a training step</h3>",
        "<td>train.optimizer.lr</td><td>0.001</td><td>0.01</td>",
    ] {
        assert!(html.contains(part), "`{part}` is not in the report");
    }
    for source in ["http:", "https:", "src=", "href="] {
        assert!(!html.contains(source), "{source}");
    }
    sandbox.succeed("report out --output report.html");
    sandbox.write("notes.html", "mine");
    let rejected = sandbox.fsdp("report out --output notes.html");
    assert_eq!((rejected.code, &*sandbox.read("notes.html")), (Some(2), "mine"), "{}", rejected.stderr);
    let absent = sandbox.fsdp("report model");
    assert_eq!(absent.code, Some(2));
    assert!(
        absent.stderr.contains("model/metrics.jsonl") && absent.stderr.contains("run.out_dir"),
        "{}",
        absent.stderr
    );
}

#[test]
fn report_works_without_model_config() {
    let sandbox = Sandbox::new();
    sandbox.succeed(RUN);
    std::fs::remove_dir_all(sandbox.path("model")).unwrap();
    sandbox.succeed("report out");
    assert!(sandbox.read("report.html").contains("out: neither is available: cannot read model/config.json"));
}

//! `fsdp plan`: predicted time and memory of a run on other machines.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::Sandbox;

/// Returns the path of a file of the repository.
fn repository(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)
}

/// Creates a sandbox with the example of an 8B model.
fn sandbox() -> Sandbox {
    let sandbox = Sandbox::new();
    let model = sandbox.path("examples/llama-8b");
    std::fs::create_dir_all(&model).unwrap();
    std::fs::copy(repository("examples/llama-8b/config.json"), model.join("config.json")).unwrap();
    std::fs::copy(repository("examples/llama-8b.toml"), sandbox.path("8b.toml")).unwrap();
    sandbox
}

const ON_16: &str = "plan 8b.toml --on h100-sxm --nodes 2 --set fsdp.mesh.replicate=1";

fn json(sandbox: &Sandbox, args: &str) -> Value {
    serde_json::from_str(&sandbox.succeed(args).stdout).unwrap()
}

fn input_error(sandbox: &Sandbox, args: &str) -> String {
    let ran = sandbox.fsdp(args);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    ran.stderr
}

#[test]
fn plan_reports_memory_time_waits_and_cost() {
    insta::assert_snapshot!("plan", sandbox().succeed(ON_16).stdout);
}

#[test]
fn json_plan_is_consistent() {
    let sandbox = sandbox();
    let plan = json(&sandbox, &format!("{ON_16} --json"));
    let number =
        |pointer: &str| plan.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}"));
    assert_eq!(number("/devices"), 16.0);
    let tokens = 256.0 * 4096.0;
    assert!((number("/step/tokens_per_second") * number("/step/seconds") / tokens - 1.0).abs() < 1e-12);
    let computing = number("/step/computing_seconds") + number("/step/exposed_seconds");
    assert!(computing <= number("/step/seconds") && number("/step/queue_seconds/compute") <= computing);
    assert!(number("/step/band_seconds/0") < number("/step/seconds"));
    // `mfu_6n` counts 6 operations for each of 8.03 billion parameters; `mfu` also counts attention.
    assert!(number("/step/mfu_6n") < number("/step/mfu") && number("/step/mfu") < number("/step/hfu"));
    assert!((number("/run/steps") - 10_000.0).abs() < 0.5);
    // Without failures, twice the tokens take twice as long.
    let longer = json(&sandbox, &format!("{ON_16} --tokens 2.097152e10 --price 2 --json"));
    let seconds = |plan: &Value| plan["run"]["seconds"].as_f64().unwrap();
    assert!((seconds(&longer) / seconds(&plan) - 2.0).abs() < 1e-9);
    assert_eq!(longer["run"]["price"], 2.0);
}

#[test]
fn search_finds_faster_settings_and_writes_best() {
    let sandbox = sandbox();
    // Few micro-batches, because each of many settings is planned with all of them.
    let on_16 = format!("{ON_16} --set train.global_batch_size=64");
    let search = format!("{on_16} --search --tokens 5.24288e9 --price 2 --write best.toml --json");
    let found = json(&sandbox, &search);
    let front = found["front"].as_array().unwrap();
    let best = front[0]["step_seconds"].as_f64().unwrap();
    let here = json(&sandbox, &format!("{on_16} --json"))["step"]["seconds"].as_f64().unwrap();
    assert!(best < here);
    let falls = |key: &str| front.windows(2).all(|pair| pair[0][key].as_f64() > pair[1][key].as_f64());
    assert!(falls("device_bytes"), "what is slower holds less");
    // The uncertainty of the times, and their basis.
    let [least, most] = [0, 1].map(|end| front[0]["band_seconds"][end].as_f64().unwrap());
    assert!(least < best && best < most);
    assert_eq!(found["assumed"], json(&sandbox, &format!("{on_16} --json"))["assumed"]);
    assert_eq!(found["sources"], json(&sandbox, &format!("{on_16} --json"))["sources"]);
    // Rejected settings come with a reason; other ways to split the model into units are among all settings.
    let losers = found["losers"].as_array().unwrap();
    assert!(losers.iter().all(|loser| !loser["why"].as_str().unwrap().is_empty()));
    let is_wrap = |loser: &&Value| loser["change"].as_str().unwrap().contains("fsdp.wrap");
    assert!(
        losers.iter().any(|loser| is_wrap(&loser)) || front[0]["change"].to_string().contains("fsdp.wrap")
    );
    // The estimate for the whole run is that of the fastest settings.
    assert_eq!(found["run"]["price"], 2.0);
    assert!((found["run"]["seconds"].as_f64().unwrap() / (best * 20_000.0) - 1.0).abs() < 1e-9);
    // Planning the written file gives the result of the search.
    let again = json(&sandbox, "plan best.toml --on h100-sxm --json");
    assert_eq!(again["step"]["seconds"].as_f64().unwrap(), best);
    assert_eq!(again["memory"]["fits"], true);
    let lost = input_error(&sandbox, &format!("{on_16} --search --write best.toml"));
    assert!(lost.contains("--write"), "{lost}");
    let small = input_error(
        &sandbox,
        "plan 8b.toml --on tpu-v5e --nodes 1 --set fsdp.mesh.replicate=1 --set train.global_batch_size=64 --search \
         --write none.toml",
    );
    assert!(small.contains("nothing fits"), "{small}");
}

/// Activations of a sequence of 131,072 tokens fit only where ranks share it.
#[test]
fn search_shares_long_sequences_among_ranks_where_faster_settings_do_not_fit() {
    let sandbox = sandbox();
    let config = sandbox.read("examples/llama-8b/config.json");
    let long = config.replace("\"max_position_embeddings\": 8192", "\"max_position_embeddings\": 131072");
    assert_ne!(long, config);
    sandbox.write("examples/llama-8b/config.json", &long);
    let plan = "plan 8b.toml --on h100-sxm --set run.ranks=8 --set fsdp.mesh.replicate=1 --set data.seq_len=131072 \
                --set train.global_batch_size=8";
    let found = json(&sandbox, &format!("{plan} --search --write best.toml --json"));
    let front = found["front"].as_array().unwrap();
    assert!(front[0]["change"].to_string().contains("fsdp.mesh.context"), "{}", front[0]);
    let again = json(&sandbox, "plan best.toml --on h100-sxm --json");
    assert_eq!(again["step"]["seconds"], front[0]["step_seconds"]);
    assert_eq!(again["memory"]["fits"], true);
    // From the largest axis, too: without it, not every rank has a micro-batch of its own.
    let from = "--set fsdp.mesh.context=8 --set train.global_batch_size=2";
    let found = json(&sandbox, &format!("{plan} {from} --search --json"));
    assert!(!found["front"].as_array().unwrap().is_empty());
}

/// Four layers of Mixtral 8x22B: gathering all experts for one sequence takes longer than computing it.
#[test]
fn search_divides_large_experts_among_ranks_where_that_is_faster() {
    let sandbox = Sandbox::new();
    let config = r#"{"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 6144, "intermediate_size": 16384,
        "num_hidden_layers": 4, "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": false}"#;
    std::fs::create_dir(sandbox.path("mixture")).unwrap();
    sandbox.write("mixture/config.json", config);
    sandbox.write(
        "mixture.toml",
        "[model]\npath = 'mixture'\n[data]\ntrain = ['data.txt']\nformat = 'text'\nseq_len = 4096\n\
         [train]\nsteps = 10\nmicro_batch_size = 1\nglobal_batch_size = 8\noptimizer = { name = 'adamw', lr = 1e-4 }\n\
         [fsdp]\nwrap = ['MixtralDecoderLayer']\nparam_dtype = 'bf16'\n[run]\nranks = 8\nout_dir = 'out'\n",
    );
    let found = json(&sandbox, "plan mixture.toml --on h100-sxm --search --write best.toml --json");
    let front = found["front"].as_array().unwrap();
    assert!(front[0]["change"].to_string().contains("fsdp.mesh.expert"), "{}", front[0]);
    let again = json(&sandbox, "plan best.toml --on h100-sxm --json");
    assert_eq!(again["step"]["seconds"], front[0]["step_seconds"]);
}

#[test]
fn predicted_trace_ends_at_predicted_step_time() {
    let sandbox = sandbox();
    let plan = json(&sandbox, &format!("{ON_16} --trace step.json --json"));
    let trace: Value = serde_json::from_str(&sandbox.read("step.json")).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let ends = events.iter().filter_map(|event| Some(event["ts"].as_f64()? + event["dur"].as_f64()?));
    let end = ends.fold(0.0, f64::max) / 1e6;
    let step = &plan["step"];
    let expected = step["computing_seconds"].as_f64().unwrap() + step["exposed_seconds"].as_f64().unwrap();
    assert!((end / expected - 1.0).abs() < 1e-9, "{end} {expected}");
}

#[test]
fn printed_cluster_gives_same_plan_as_cluster_file() {
    let sandbox = sandbox();
    let copy = sandbox.succeed(&format!("{ON_16} --print-cluster")).stdout;
    sandbox.write("mine.toml", &copy);
    let own = ON_16.replace("--on h100-sxm", "--cluster mine.toml");
    assert_eq!(json(&sandbox, &format!("{own} --json")), json(&sandbox, &format!("{ON_16} --json")));
    sandbox.write("mine.toml", copy.replace("[device.memory]\nvalue = ", "[device.memory]\nvalue = -"));
    let wrong = input_error(&sandbox, &own);
    assert!(wrong.contains("mine.toml: `device.memory` is -"), "{wrong}");
}

#[test]
fn device_alias_and_cluster_file_match_known_clusters() {
    let sandbox = sandbox();
    let short = json(&sandbox, "plan 8b.toml --on a100-80 --tokens 1.4e12 --price 2.1 --json");
    assert_eq!((&short["cluster"], &short["run"]["price"]), (&"a100-80-sxm".into(), &2.1.into()));
    assert!(short["sources"].as_array().unwrap().len() > 10);
    let file = repository("examples/clusters/h100-8x8.toml");
    std::fs::copy(file, sandbox.path("h100-8x8.toml")).unwrap();
    let own = json(&sandbox, "plan 8b.toml --cluster h100-8x8.toml --json");
    let known = json(&sandbox, "plan 8b.toml --on h100-sxm --nodes 8 --json");
    assert_eq!((&own["step"], &own["devices"]), (&known["step"], &64.into()));
    let more = input_error(&sandbox, "plan 8b.toml --cluster h100-8x8.toml --nodes 16");
    assert!(more.contains("h100-8x8 has 8 nodes, not 16"), "{more}");
}

#[test]
fn unvalidated_predictions_show_wide_band_first() {
    let sandbox = sandbox();
    let time = |on: &str| {
        let report =
            sandbox.succeed(&format!("plan 8b.toml --on {on} --set train.global_batch_size=1024")).stdout;
        report.lines().find(|line| line.starts_with("time ")).unwrap().to_owned()
    };
    // More ranks than any plan was validated with; a GPU generation without fitted runs; and a validated case.
    for (on, is_wide) in
        [("h100-sxm --nodes 128", true), ("mi300x --nodes 8", true), ("h100-sxm --nodes 64", false)]
    {
        let line = time(on);
        assert_eq!(line.contains("(what follows is for "), is_wide, "{on}: {line}");
        assert!(line.contains(" to "), "{line}");
    }
}

#[test]
fn invalid_plans_are_rejected_with_reason() {
    let sandbox = sandbox();
    for (name, near) in [("h100sxm", "h100-sxm"), ("b100", "b200"), ("H1O0", "h100")] {
        let message = input_error(&sandbox, &format!("plan 8b.toml --on {name}"));
        assert!(message.contains(&format!("did you mean `{near}`?")), "{message}");
    }
    for ignored in ["--report plan.html", "--trace plan.json"] {
        assert!(
            input_error(&sandbox, &format!("{ON_16} --search {ignored}")).contains("cannot be used with")
        );
    }
    assert!(input_error(&sandbox, "plan 8b.toml").contains("--on <NAME>"));
    let nothing = input_error(&sandbox, &format!("{ON_16} --tokens -1"));
    assert!(nothing.contains("expected a number above 0"), "{nothing}");
    let world = input_error(&sandbox, "plan 8b.toml --on h100-sxm --nodes 3");
    assert!(world.contains("--nodes: ") && world.contains("micro-batches"), "{world}");
    let replicas = input_error(&sandbox, "plan 8b.toml --on h100-sxm --nodes 1 --set fsdp.mesh.replicate=16");
    assert!(replicas.contains("8 ranks cannot form fsdp.mesh.replicate = 16 replicas"), "{replicas}");
    let partial = input_error(
        &sandbox,
        "plan 8b.toml --on h100-sxm --set run.ranks=12 --set train.global_batch_size=12 --set fsdp.mesh.replicate=1",
    );
    assert!(partial.contains("do not fill whole nodes of 8 devices"), "{partial}");
    let peak =
        input_error(&sandbox, &format!("{ON_16} --set fsdp.param_dtype=f64 --set fsdp.reduce_dtype=f64"));
    assert!(peak.contains("`device.peak.f64`"), "{peak}");
}

#[test]
fn plan_report_is_self_contained() {
    let sandbox = sandbox();
    sandbox.succeed(&format!("{ON_16} --report plan.html"));
    let html = sandbox.read("plan.html");
    for part in [
        "One step",
        "Memory of a device over the step",
        "What computation waits for",
        "on more nodes",
        "Assumed",
    ] {
        assert!(html.contains(part), "{part}");
    }
    assert!(html.contains("<title>backward layers.0.mlp, ") && html.contains("all-gather of (root)"));
    for source in ["src=", "href=", "@import", "url("] {
        assert!(!html.contains(source), "{source}");
    }
    // The report of a small step uses smaller units of time and bytes.
    assert!(html.contains(">seconds</text>") && html.contains(">GiB</text>"));
    sandbox.succeed("plan run.toml --on cpu-2core --report small.html");
    let small = sandbox.read("small.html");
    assert!(
        small.contains("seconds</text>")
            && !small.contains(">seconds</text>")
            && small.contains(">MiB</text>")
    );
    sandbox.write("mine.html", "my notes");
    assert!(input_error(&sandbox, &format!("{ON_16} --report mine.html")).contains("not a report"));
    assert_eq!(sandbox.read("mine.html"), "my notes");
}

/// With a base in 4 bits, as docs/adapters.md says.
#[test]
fn model_of_70_billion_parameters_fits_two_cards_of_24_gigabytes() {
    let args = "plan examples/llama-70b-qlora.toml --cluster examples/clusters/rtx-4090-x2.toml";
    let planned = |more: &[&str]| {
        let mut command = Sandbox::new().command();
        let ran = command.current_dir(repository(".")).args(args.split(' ')).args(more).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    };
    let quantized = planned(&[]);
    assert!(quantized.contains("fits: 11.9 GiB of 23.6 GiB are left"), "{quantized}");
    let page = std::fs::read_to_string(repository("docs/adapters.md")).unwrap();
    assert!(page.contains("`fits: 11.9 GiB of 23.6 GiB are left`"));
    // In bf16, the base takes three and a half times as much.
    let host = |text: &str| {
        text.lines().find(|line| line.contains("on the host: parameter shards")).unwrap().to_owned()
    };
    assert!(host(&quantized).contains("19.0 GiB"), "{quantized}");
    let floats = planned(&["--set", "adapter.quantize=none"]);
    assert!(host(&floats).contains("66.3 GiB"), "{floats}");
}

//! The mixture of experts of `examples/`, shortened: every mesh of its chunks has the same bits, in verification, training,
//! resumption and evaluation.

use std::path::Path;

use serde_json::Value;

use crate::support::{Ran, Sandbox, folded};

/// A short run over little data.
const SHORT: &str = "--set data.train=['docs/memory.md'] --set data.seq_len=16 --set train.global_batch_size=8 \
                     --set train.micro_batch_size=1";

/// Runs `fsdp` in the repository root, to which the paths in examples are relative.
fn fsdp(args: &str) -> Ran {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let ran = Sandbox::new().command().args(args.split_whitespace()).current_dir(root).output().unwrap();
    Ran::of(ran)
}

fn succeed(args: &str) -> Ran {
    let ran = fsdp(args);
    assert_eq!(ran.code, Some(0), "{args}: {}", ran.stderr);
    ran
}

fn refusal(args: &str) -> String {
    let ran = fsdp(&format!("train examples/mixture.toml --set run.out_dir=target/nowhere {args}"));
    assert_eq!(ran.code, Some(2), "{args}: {}", ran.stderr);
    folded(&ran.stderr)
}

#[test]
fn meshes_of_one_chunking_have_equal_bits() {
    let meshes = [
        "shard=2",
        "shard=2,expert=2",
        "shard=4,expert=4",
        "context=2,expert=2",
        "shard=2,context=2,expert=4",
    ];
    let ran =
        succeed(&format!("verify examples/mixture.toml {SHORT} --steps 1 --meshes {}", meshes.join(";")));
    let worlds = ran.stdout.lines().filter(|line| line.starts_with("world ")).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(worlds, @r"
    world 2: mesh 1 x 2 (replicate x shard), promised: equal bits (D2)
    world 2: mesh 1 x 2 (replicate x shard) with 2 (expert), promised: equal bits (D2)
    world 4: mesh 1 x 4 (replicate x shard) with 4 (expert), promised: equal bits (D2)
    world 2: mesh 1 x 1 x 2 (replicate x shard x context) with 2 (expert), promised: equal bits (D2)
    world 4: mesh 1 x 2 x 2 (replicate x shard x context) with 4 (expert), promised: equal bits (D2)
    ");
    assert!(ran.stdout.ends_with("every promise was kept at 5 meshes\n"), "{}", ran.stdout);
}

#[test]
fn run_continues_and_is_evaluated_on_other_meshes_with_the_same_bits() {
    let sandbox = Sandbox::new();
    let train = |out: &str, args: &str| {
        let out = sandbox.path(out).display().to_string();
        succeed(&format!(
            "train examples/mixture.toml {SHORT} --set run.out_dir={out} --set checkpoint.every=2 \
             --set data.eval=['docs/memory.md'] --set data.eval_every=2 --set data.eval_batches=2 {args}"
        ))
    };
    let exported =
        |out: &str| std::fs::read(sandbox.path(&format!("{out}/model/model.safetensors"))).unwrap();
    let losses = |out: &str| -> Vec<f64> {
        let lines = sandbox.read(&format!("{out}/metrics.jsonl"));
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter_map(|line| line["eval_loss"].as_f64()).collect()
    };
    train("whole", "--set train.steps=4 --set fsdp.mesh.expert=1 --set run.ranks=1");
    train("moved", "--set train.steps=4 --set fsdp.mesh.expert=4");
    assert!(exported("whole") == exported("moved"));
    assert_eq!(losses("whole").len(), 2);
    assert_eq!(losses("whole"), losses("moved"));
    train("resumed", "--set train.steps=2 --set fsdp.mesh.expert=2");
    train("resumed", "--resume --set train.steps=4 --set fsdp.mesh={context=1,expert=2,replicate=2}");
    assert!(exported("whole") == exported("resumed"));
    let evaluated = |mesh: &str| {
        let model = sandbox.path("whole/model").display().to_string();
        let set = "--set data.eval=['docs/memory.md'] --set data.eval_batches=2 --json";
        succeed(&format!("eval examples/mixture.toml {SHORT} {set} --model {model} --set fsdp.mesh={mesh}"))
            .stdout
    };
    let loss = |json: String| serde_json::from_str::<Value>(&json).unwrap()["evaluations"][0]["loss"].clone();
    let alone = loss(evaluated("{expert=1}"));
    assert!(alone.as_f64().is_some_and(|loss| Some(&loss) == losses("whole").last()), "{alone}");
    for mesh in ["{expert=4}", "{context=1,expert=2,replicate=2}"] {
        assert_eq!(loss(evaluated(mesh)), alone, "{mesh}");
    }
}

#[test]
fn what_training_refuses_is_found_by_check_and_named_for_shrunk_models() {
    let checked =
        fsdp("check examples/mixture.toml --set run.out_dir=target/nowhere --set fsdp.chunks.expert=16");
    assert_eq!(checked.code, Some(2), "{}", checked.stdout);
    assert!(
        checked.stdout.contains("fsdp.chunks.expert: 16 does not divide the 8 experts"),
        "{}",
        checked.stdout
    );
    let shrunk = fsdp("verify examples/mixture.toml --shrink --meshes shard=8,expert=8");
    assert_eq!(shrunk.code, Some(2), "{}", shrunk.stderr);
    insta::assert_snapshot!(folded(&shrunk.stderr), @r"
    shrunk: 8 chunks of experts to 2
    shrunk: 1.41M parameters to 13.6K
    shrunk: 4 layers, hidden 128, heads 8/4, ffn 384, vocabulary 256 to 3 layers, hidden 16, heads 4/2,
    ffn 48, vocabulary 256
    shrunk: sequences of 128 tokens to 32, 8 micro-batches of 2 to 16 of 1
    error: --meshes: the shrunk model: 8 does not divide the 4 experts of a mixture, but 4 does; choose
    smaller axes, or leave out --shrink
    ");
}

#[test]
fn axes_that_do_not_fit_are_refused_by_key_with_what_does() {
    insta::assert_snapshot!(refusal("--set fsdp.mesh.expert=3"), @r"
    error: --set fsdp.mesh.expert: `fsdp.mesh.expert` is 3; it must be a power of two: sums over chunks
    are trees
    ");
    insta::assert_snapshot!(refusal("--set fsdp.mesh.expert=8"), @r"
    error: --set fsdp.mesh.expert: `fsdp.mesh.expert` = 8 does not divide fsdp.chunks.expert = 4; the
    nearest that does is 4, or change the other
    ");
    insta::assert_snapshot!(refusal("--set fsdp.chunks.expert=16"), @r"
    error: fsdp.chunks.expert: 16 does not divide the 8 experts of a mixture, but 8 does
    ");
    insta::assert_snapshot!(refusal("--set run.ranks=2 --set fsdp.mesh={expert=2,replicate=2}"), @r"
    error: --set fsdp.mesh: `fsdp.mesh.expert` = 2 does not divide run.ranks / fsdp.mesh.replicate = 1;
    the nearest that does is 1, or change the other
    ");
    insta::assert_snapshot!(refusal("--set fsdp.reduce_op=average"), @r#"
    error: fsdp.reduce_op = average: must be "sum" with an expert axis: gradients of experts are of
    fewer ranks
    "#);
    insta::assert_snapshot!(refusal("--set fsdp.frozen=['experts.1.']"), @r"
    error: fsdp.mesh.expert = 2: experts of model.layers.0 must be alike, in their shapes and in what
    is trained, to be divided
    ");
    insta::assert_snapshot!(refusal("--set model.path=examples/llama-tiny --set fsdp.wrap=['LlamaDecoderLayer']"), @r"
    error: fsdp.mesh.expert = 2: must be 1: the model has no mixtures of experts
    ");
}

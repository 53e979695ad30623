//! `fsdp verify`: which world sizes are verified, and the promises of a shrunk run.

use crate::support::{Sandbox, folded};

/// Returns the lines about worlds, promises and skipping.
fn outcome(text: &str) -> String {
    let speaks = |line: &&str| {
        ["world ", "skipped ", "shrunk: ", "no world"]
            .iter()
            .any(|start| line.trim_start_matches("note: ").starts_with(start))
    };
    folded(&text.lines().filter(speaks).collect::<Vec<_>>().join("\n"))
}

#[test]
fn verify_trains_nothing_when_no_world_size_fits() {
    let ran = Sandbox::new().fsdp("verify run.toml --world-sizes 3");
    assert_eq!(ran.code, Some(1));
    assert!(!ran.stderr.contains("training"), "{}", ran.stderr);
    insta::assert_snapshot!(folded(&ran.stdout), @r"
    8.0K parameters in 3 units, 4 micro-batches per step

    skipped world 3: a world of 3: `run.ranks` = 3 does not divide the micro-batches of a step = 4; the
    nearest that does is 2, or change the other

    no world size was verified: none of them fits the configuration
    ");
}

/// The chunks of the largest context axis are those of all meshes, so that all have the bits of one run.
#[test]
fn meshes_of_one_chunking_have_equal_bits() {
    let meshes = ["shard=2", "context=2", "shard=2,context=2", "replicate=2,shard=2"].join(";");
    let ran = Sandbox::new().succeed(&format!("verify run.toml --steps 1 --meshes {meshes}"));
    insta::assert_snapshot!(outcome(&ran.stdout), @r"
    world 2: mesh 1 x 2 (replicate x shard), promised: equal bits (D2)
    world 2: mesh 1 x 1 x 2 (replicate x shard x context), promised: equal bits (D2)
    world 4: mesh 1 x 2 x 2 (replicate x shard x context), promised: equal bits (D2)
    world 4: mesh 2 x 2 (replicate x shard), promised: equal bits (D2)
    ");
    assert!(ran.stdout.ends_with("every promise was kept at 4 meshes\n"), "{}", ran.stdout);
}

#[test]
fn meshes_that_the_model_cannot_be_cut_for_are_refused_by_key() {
    let ran = Sandbox::new().fsdp("verify run.toml --meshes context=16;shard=2");
    assert_eq!(ran.code, Some(2));
    insta::assert_snapshot!(folded(&ran.stderr), @r"
    error: fsdp.chunks.context: block `layers.0.attention`: 4 query heads and 2 key heads cannot be
    shared among 16 chunks of samples, but among 4
    ");
}

#[test]
fn shrunk_run_keeps_promises_of_run_file() {
    let sandbox = Sandbox::new();
    let set = "--steps 1 --shrink --set train.micro_batch_size=1 --set data.seq_len=2";
    let powers = sandbox.succeed(&format!("verify run.toml {set} --set train.global_batch_size=32"));
    insta::assert_snapshot!(outcome(&powers.stdout), @r"
    world 1: mesh 1 x 1 (replicate x shard), promised: equal bits (D2)
    world 2: mesh 1 x 2 (replicate x shard), promised: equal bits (D2)
    world 4: mesh 1 x 4 (replicate x shard), promised: equal bits (D2)
    ");
    let others = sandbox.succeed(&format!("verify run.toml {set} --set train.global_batch_size=24"));
    insta::assert_snapshot!(outcome(&others.stdout), @r"
    world 1: mesh 1 x 1 (replicate x shard), promised: derived bounds
    world 2: mesh 1 x 2 (replicate x shard), promised: derived bounds
    world 4: mesh 1 x 4 (replicate x shard), promised: derived bounds
    ");
    let three = format!("verify run.toml {set} --set train.global_batch_size=32 --world-sizes 1,2,3");
    insta::assert_snapshot!(outcome(&sandbox.succeed(&three).stdout), @r"
    world 1: mesh 1 x 1 (replicate x shard), promised: equal bits (D2)
    world 2: mesh 1 x 2 (replicate x shard), promised: equal bits (D2)
    skipped world 3: a world of 3: `run.ranks` = 3 does not divide the micro-batches of a step = 32;
    the nearest that does is 2, or change the other
    ");
}

#[test]
fn world_with_different_promise_is_noted() {
    let sandbox = Sandbox::new();
    let set = "--steps 1 --set fsdp.accumulation_order=running";
    let ran = sandbox.succeed(&format!("verify run.toml --shrink --world-sizes 1,2 {set}"));
    insta::assert_snapshot!(outcome(&ran.stdout), @r"
    world 1: mesh 1 x 1 (replicate x shard), promised: equal bits (D2)
    world 2: mesh 1 x 2 (replicate x shard), promised: derived bounds
    ");
    insta::assert_snapshot!(outcome(&ran.stderr), @r"
    shrunk: 8.0K parameters to 8.0K
    shrunk: 2 layers, hidden 16, heads 4/2, ffn 24, vocabulary 256 to 2 layers, hidden 16, heads 4/2,
    ffn 24, vocabulary 256
    shrunk: sequences of 8 tokens to 8, 4 micro-batches of 2 to 4 of 1
    world 1 was checked for equal bits (D2); the run file itself, with its 2 ranks and 4 micro-batches
    per step, promises derived bounds
    ");
}

#[test]
fn shrunk_groups_are_noted_and_skip_reason_quotes_run_file() {
    let sandbox = Sandbox::new();
    let set = "--set run.ranks=8 --set train.micro_batch_size=1 --set fsdp.reshard_after_forward=4";
    let ran = sandbox.succeed(&format!("verify run.toml --shrink --steps 1 --world-sizes 1,2 {set}"));
    insta::assert_snapshot!(outcome(&ran.stderr), @r"
    shrunk: resharding to groups of 4 to 2
    shrunk: 8.0K parameters to 8.0K
    shrunk: 2 layers, hidden 16, heads 4/2, ffn 24, vocabulary 256 to 2 layers, hidden 16, heads 4/2,
    ffn 24, vocabulary 256
    shrunk: sequences of 8 tokens to 8, 8 micro-batches of 1 to 2 of 1
    ");
    insta::assert_snapshot!(outcome(&ran.stdout), @r"
    world 2: mesh 1 x 2 (replicate x shard), promised: equal bits (D2)
    skipped world 1: fsdp.reshard_after_forward = 2: a group size must divide the shard axis of 1 ranks
    (--shrink made this of the run file's 4)
    ");
}

//! The output of `fsdp ckpt`, as text and as JSON.

use crate::support::Sandbox;

/// A checkpoint of each kind: fixtures, and a native one converted from a fixture.
const KINDS: [(&str, &str); 8] = [
    ("dcp", "dcp_2rank"),
    ("dcp_zstd", "dcp_2rank_zstd"),
    ("xla", "xla_fsdp_2rank/trained_rank-00000000-of-00000002.pth"),
    ("dtensors", "fsdp2_rank_pth/model_world_size_2_rank_0.pt"),
    ("torch", "full.pth"),
    ("hf_sharded", "hf_sharded"),
    ("dcp_shards", "hf_dcp_shards"),
    ("native", "native"),
];

fn sandbox() -> Sandbox {
    let sandbox = Sandbox::with_fixtures(&[
        "dcp_2rank",
        "dcp_2rank_zstd",
        "xla_fsdp_2rank",
        "fsdp2_rank_pth",
        "full.pth",
        "hf_sharded",
        "hf_dcp_shards",
    ]);
    sandbox.succeed("ckpt convert dcp_2rank native --to native --world-size 3 --no-sync");
    sandbox
}

/// Replaces times and rates in a summary, which depend on the machine.
fn timeless(text: &str) -> String {
    let line = |line: &str| match line.split_once(':') {
        _ if line.starts_with("time ") => "time          ..\n".to_owned(),
        Some((key @ ("  \"seconds\"" | "  \"bytes_per_second\""), _)) => format!("{key}: ..,\n"),
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

#[test]
fn inspect_describes_all_checkpoint_kinds() {
    let sandbox = sandbox();
    for (kind, path) in KINDS {
        insta::assert_snapshot!(
            format!("inspect_{kind}"),
            sandbox.succeed(&format!("ckpt inspect {path}")).stdout
        );
    }
}

#[test]
fn inspect_lists_tensors_and_chunks() {
    let sandbox = sandbox();
    insta::assert_snapshot!(
        "inspect_tensors",
        sandbox.succeed("ckpt inspect hf_dcp_shards --tensors").stdout
    );
    insta::assert_snapshot!(
        "inspect_tensors_json",
        sandbox.succeed("ckpt inspect fsdp2_rank_pth --tensors --json").stdout
    );
}

#[test]
fn inspect_json_contains_all_values() {
    let sandbox = sandbox();
    insta::assert_snapshot!("inspect_json", sandbox.succeed("ckpt inspect native --json").stdout);
}

#[test]
fn inspect_reports_missing_rows() {
    let sandbox = Sandbox::with_fixtures(&["fsdp1_ranks/sharded_tensor"]);
    std::fs::remove_file(sandbox.path("fsdp1_ranks/sharded_tensor/rank1.pt")).unwrap();
    let ran = sandbox.succeed("ckpt inspect fsdp1_ranks/sharded_tensor");
    insta::assert_snapshot!("inspect_missing_rows", ran.stdout);
    sandbox.find_fault("ckpt verify fsdp1_ranks/sharded_tensor");
}

#[test]
fn verify_reports_checked_and_unprotected_data() {
    let sandbox = sandbox();
    for (kind, path) in KINDS {
        insta::assert_snapshot!(
            format!("verify_{kind}"),
            sandbox.succeed(&format!("ckpt verify {path}")).stdout
        );
    }
    insta::assert_snapshot!("verify_json", sandbox.succeed("ckpt verify full.pth --json").stdout);
}

#[test]
fn convert_prints_summary() {
    let sandbox = sandbox();
    let to_file = "ckpt convert dcp_2rank model.safetensors --to safetensors --strip-prefix model.";
    insta::assert_snapshot!("convert_to_safetensors", timeless(&sandbox.succeed(to_file).stdout));
    let all = "ckpt convert full.pth all --to safetensors --only all --max-shard-size 2kB";
    insta::assert_snapshot!("convert_all_to_safetensors", timeless(&sandbox.succeed(all).stdout));
    let json = "ckpt convert full.pth one.safetensors --to safetensors --json";
    insta::assert_snapshot!("convert_json", timeless(&sandbox.succeed(json).stdout));
}

#[test]
fn diff_lists_differences() {
    let sandbox = sandbox();
    insta::assert_snapshot!(sandbox.succeed("ckpt diff dcp_2rank native").stdout, @r"
    A             dcp_2rank (PyTorch DCP 1.0.0)
    B             native (native)

    no difference: 45 tensors (45 equal bits)
    ");
    sandbox.succeed("ckpt convert dcp_2rank bf16 --to dcp --dtype bf16 --only model --rename tail=end");
    insta::assert_snapshot!("diff", sandbox.find_fault("ckpt diff dcp_2rank bf16 --only model").stdout);
    insta::assert_snapshot!(
        "diff_json",
        sandbox.find_fault("ckpt diff dcp_2rank bf16 --only model --rtol 0.01 --json").stdout
    );
}

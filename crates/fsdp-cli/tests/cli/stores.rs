//! Object store URLs wherever a path is accepted. `file:` treats a folder as an object store.

use crate::support::Sandbox;

#[cfg(not(feature = "object-store"))]
#[test]
fn url_error_names_missing_object_store_feature() {
    let sandbox = Sandbox::new();
    for args in [
        "train run.toml --set run.out_dir=s3://bucket/run",
        "train run.toml --resume-from s3://bucket/run/checkpoints/step-00000003",
        "train run.toml --set model.path=s3://bucket/model",
        "train run.toml --set data.train=[\"s3://bucket/data.txt\"]",
        "ckpt inspect s3://bucket/run",
        "ckpt verify s3://bucket/run",
        "ckpt convert s3://bucket/run out --to dcp",
    ] {
        let ran = sandbox.fsdp(args);
        assert_eq!(ran.code, Some(2), "{args}: {}{}", ran.stdout, ran.stderr);
        assert!(ran.stderr.contains("s3://bucket/"), "{args}: {}", ran.stderr);
        assert!(ran.stderr.contains("--features object-store"), "{args}: {}", ran.stderr);
    }
    assert!(!sandbox.path("s3:").exists(), "nobody takes it for a folder");
}

#[cfg(feature = "object-store")]
mod with_stores {
    use super::*;
    use crate::world::{FSDP, World};

    /// Asserts that two checkpoints have equal tensors; their run states may differ.
    fn same_tensors(sandbox: &Sandbox, one: &str, other: &str) {
        let report = sandbox.fsdp(&format!("ckpt diff {one} {other}")).stdout;
        assert!(
            report.contains("no tensor differs") || report.contains("no difference"),
            "{one} {other}: {report}"
        );
    }

    /// Tests everything against a URL: training in threads and in processes, resuming, and the `ckpt` commands.
    fn works(sandbox: &Sandbox, root: &str) {
        let common = "--set checkpoint.every=2 --set checkpoint.keep_last=0 --set train.steps=4";
        sandbox.succeed(&format!("train run.toml {common} --set run.out_dir=disk"));
        let last = format!("{root}/checkpoints/step-00000004");
        World::succeed(sandbox, FSDP, 2, &format!("train run.toml {common} --set run.out_dir={root}"));
        same_tensors(sandbox, "disk/checkpoints/step-00000004", &last);
        same_tensors(sandbox, "disk/model/model.safetensors", &format!("{root}/model/model.safetensors"));

        let more = common.replace("steps=4", "steps=6");
        let ran = sandbox.succeed(&format!("train run.toml {more} --set run.out_dir={root} --resume"));
        assert!((ran.stdout + &ran.stderr).contains("step-00000004"), "it goes on from there");
        sandbox.succeed(&format!("train run.toml {more} --set run.out_dir=there --resume-from {last}"));
        let end = "checkpoints/step-00000006";
        same_tensors(sandbox, &format!("there/{end}"), &format!("{root}/{end}"));
        let rejected = sandbox.fsdp(&format!("train run.toml {more} --set run.out_dir={root}"));
        assert_eq!(rejected.code, Some(2), "{}", rejected.stderr);
        assert!(rejected.stderr.contains("is not empty"), "{}", rejected.stderr);

        let sound = sandbox.succeed(&format!("ckpt verify {last}"));
        assert!(sound.stdout.contains("every byte is protected"), "{}", sound.stdout);
        assert!(sandbox.succeed(&format!("ckpt inspect {last}")).stdout.contains(&last));
        for target in ["dcp", "native", "torch", "safetensors"] {
            let out = format!("{root}-converted/{target}");
            sandbox.succeed(&format!("ckpt convert {last} {out} --to {target}"));
            same_tensors(sandbox, &format!("--only model {last}"), &out);
        }
        let again = sandbox.fsdp(&format!("ckpt convert {last} {root}-converted/dcp --to dcp"));
        assert_eq!(again.code, Some(2), "{}", again.stderr);
        assert!(again.stderr.contains("exists already"), "{}", again.stderr);
    }

    #[test]
    fn file_url_stores_runs_and_checkpoints() {
        let sandbox = Sandbox::new();
        works(&sandbox, &format!("file://{}", sandbox.path("store/run").display()));
    }

    /// Needs `FSDP_TEST_S3=http://127.0.0.1:PORT`, a server (moto) with a bucket `fsdp-test`.
    #[test]
    fn s3_stores_runs_and_checkpoints() {
        if std::env::var_os("FSDP_TEST_S3").is_none() {
            println!("skipped: FSDP_TEST_S3 names no server");
            return;
        }
        works(&Sandbox::new(), &format!("s3://fsdp-test/run-{}", std::process::id()));
    }

    #[test]
    fn weights_and_data_are_read_from_urls() {
        let sandbox = Sandbox::new();
        sandbox.succeed("train run.toml --set run.out_dir=first");
        let url = |name: &str| format!("file://{}", sandbox.path(name).display());
        let run = |model: &str, data: &str, out: &str| {
            sandbox.succeed(&format!(
                "train run.toml --set model.path={model} --set model.init=pretrained --set data.train=[\"{data}\"] \
                 --set run.out_dir={out}"
            ));
        };
        run("first/model", "data.txt", "paths");
        run(&url("first/model"), &url("data.txt"), "urls");
        assert_eq!(sandbox.column("paths", "loss"), sandbox.column("urls", "loss"));
        assert!(sandbox.path("cache/fsdp").is_dir(), "data is copied to where it is kept");
        let missing = sandbox.fsdp(&format!(
            "train run.toml --set data.train=[\"{}\"] --set run.out_dir=none",
            url("none.txt")
        ));
        assert_eq!(missing.code, Some(2), "{}", missing.stderr);
        assert!(missing.stderr.contains("none.txt"), "{}", missing.stderr);
    }

    #[test]
    fn unknown_url_scheme_lists_known_ones() {
        let ran = Sandbox::new().fsdp("ckpt inspect s4://bucket/run");
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        assert!(ran.stderr.contains("there are s3, gs, az"), "{}", ran.stderr);
    }
}

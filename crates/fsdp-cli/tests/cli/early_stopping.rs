//! `[train.early_stop]`: evaluations end a run.

use crate::support::Sandbox;

/// A run that learns nothing, and looks at that after every step.
const STILL: &str = "train run.toml --set train.optimizer.lr=1e-30 --set data.eval=[\"data.txt\"] --set data.eval_every=1 \
                     --set train.early_stop.patience=2";

#[test]
fn a_run_whose_loss_stays_ends_when_its_patience_does() {
    let sandbox = Sandbox::new();
    let ran = sandbox.succeed(&format!("{STILL} --set train.steps=9"));
    assert_eq!(sandbox.metrics("out").len(), 3);
    assert!(ran.stdout.contains("3 of 9: evaluations give no lower loss than 5."), "{}", ran.stdout);
    assert!(ran.stdout.contains(", after step 1, in"), "{}", ran.stdout);
    assert!(sandbox.path("out/model/model.safetensors").exists());
    assert!(!sandbox.path("out/checkpoints/step-00000003").exists(), "no states are kept");
}

#[test]
fn patience_goes_on_with_the_run_and_what_is_over_stays_over() {
    let (cut, whole) = (Sandbox::new(), Sandbox::new());
    let kept = format!("{STILL} --set checkpoint.every=1");
    whole.succeed(&format!("{kept} --set train.steps=9"));
    cut.succeed(&format!("{kept} --set train.steps=2"));
    let ran = cut.succeed(&format!("{kept} --set train.steps=9 --resume"));
    assert!(ran.stdout.contains("3 of 9: evaluations"), "{}", ran.stdout);
    assert_eq!(cut.evaluations("out"), whole.evaluations("out"));
    let again = cut.succeed(&format!("{kept} --set train.steps=9 --resume --set run.ranks=4"));
    assert!(again.stdout.contains("3 of 9: evaluations"), "{}", again.stdout);
    assert_eq!(cut.evaluations("out"), whole.evaluations("out"));
    // Who has more patience goes on.
    cut.succeed(&format!("{kept} --set train.steps=9 --resume --set train.early_stop.patience=4"));
    assert_eq!(cut.evaluations("out").len(), 5);
}

#[test]
fn the_set_that_is_watched_must_be_evaluated() {
    let sandbox = Sandbox::new();
    let refused = |args: &str| {
        let ran = sandbox.fsdp(&format!("train run.toml --set train.early_stop.patience=2 {args}"));
        assert_eq!(ran.code, Some(2), "{}", ran.stderr);
        ran.stderr
    };
    assert!(refused("").contains("train.early_stop"));
    let other = refused("--set data.eval=[\"data.txt\"] --set train.early_stop.set=other");
    assert!(other.contains("the name of an evaluation set: eval"), "{other}");
}

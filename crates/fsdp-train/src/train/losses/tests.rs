//! Losses of runs that go well, and of runs that are about to diverge.

use proptest::prelude::*;

use super::*;

/// A run whose steps have these losses, from step 1.
fn run(losses: &[f64]) -> Losses {
    let mut run = Losses::new(256);
    (1..).zip(losses).for_each(|(step, &loss)| run.push(StepLoss { step, loss, grad_norm: 1.0 }));
    run
}

/// The steps done by each state of a run whose loss is not one to continue from.
fn spoiled(losses: &[f64]) -> Vec<u64> {
    let run = run(losses);
    let states = 0..losses.len() as u64;
    states.filter(|&done| run.judge(done).unwrap().is_err()).collect()
}

#[test]
fn states_of_a_run_that_goes_well_are_sound() {
    assert_eq!(spoiled(&[5.545, 5.55, 5.53, 5.6, 5.54]), [0; 0], "nothing is learned yet");
    assert_eq!(spoiled(&[5.5, 4.0, 3.0, 2.5, 2.4, 2.9, 2.3]), [0; 0]);
    assert_eq!(spoiled(&[0.1, 2.3, 0.4, 3.1, 1.2, 0.9, 2.8]), [0; 0], "batches of one sample");
    assert_eq!(spoiled(&[12.0, 9.0, 7.0, 5.0]), [0; 0], "an initialization worse than knowing nothing");
}

#[test]
fn states_of_growing_loss_are_spoiled() {
    assert_eq!(spoiled(&[5.5, 2e9]), [1]);
    assert_eq!(spoiled(&[5.5, 4.0, 3.0, 9.0, 40.0, 1e5, f64::INFINITY]), [3, 4, 5, 6]);
    assert_eq!(spoiled(&[1.5, 1.4, 1.4, 1.3, 4.5, 5.9]), [4, 5], "a pretrained model is lost below ln V");
    assert_eq!(spoiled(&[5.5, 9.0, 30.0, 1e3, 1e5, 1e9]), [1, 2, 3, 4, 5], "most of the run is lost");
    assert_eq!(spoiled(&[5.5, f64::NAN, 7.0]), [1, 2]);
}

#[test]
fn state_is_judged_by_the_next_step() {
    let mut run = Losses::new(256);
    (3..6).for_each(|step| {
        run.push(StepLoss { step, loss: if step == 5 { 1e9 } else { 5.0 }, grad_norm: 1.0 })
    });
    run.begin_with((1..3).map(|step| StepLoss { step, loss: 5.5, grad_norm: 1.0 }).collect());
    let judged: Vec<_> = (0..6).map(|done| run.judge(done)).collect();
    assert_eq!(
        judged,
        [Some(Ok(())), Some(Ok(())), Some(Ok(())), Some(Ok(())), Some(Err(Spoiled::High(1e9))), None]
    );
    assert_eq!(run.first(), Some(5.5));
    assert_eq!([0, 2, 3, 5, 9].map(|until| run.newest_sound(until)), [0, 2, 3, 3, 3]);
    assert_eq!(Losses::new(256).newest_sound(9), 0);
}

#[test]
fn state_without_gradient_is_spoiled_unless_nothing_counts() {
    let mut run = Losses::new(256);
    for (step, (loss, grad_norm)) in (1..).zip([(5.5, 0.8), (256_f64.ln(), 0.0), (0.0, 0.0), (5.4, f64::NAN)])
    {
        run.push(StepLoss { step, loss, grad_norm });
    }
    let judged: Vec<_> = (0..4).map(|done| run.judge(done).unwrap()).collect();
    assert_eq!(judged, [Ok(()), Err(Spoiled::Dead), Ok(()), Ok(())]);
}

proptest! {
    /// The rule, computed naively.
    #[test]
    fn soundness_matches_sorted_history(losses in prop::collection::vec(0.0..20.0_f64, 1..40), loss in 0.0..20.0_f64) {
        let (run, done) = (run(&losses), losses.len() as u64);
        let nothing = losses[0].max(256_f64.ln()) + 1.0;
        let mut sorted = losses.clone();
        sorted.sort_by(f64::total_cmp);
        let limit = (sorted[sorted.len() / 2].min(nothing) + nothing) / 2.0;
        prop_assert_eq!(run.is_sound(done, loss), loss <= limit);
    }
}

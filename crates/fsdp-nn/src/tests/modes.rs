//! Runs the same micro-batch in different ways: recorded, recomputed, partly frozen, evaluated, in other dtypes.

use fsdp_core::DType;

use super::harness::{Subject, batch, freeze, gpt2, hf_models, llama, small};
use crate::model::{Architecture, Batch, Decoder, DecoderConfig, Gpt2, Gpt2Config};
use fsdp_core::program::Pass;
use fsdp_core::schedule::Checkpointing;

fn recomputing_changes_nothing_of<A: Architecture + Clone>(architecture: &A) {
    for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16] {
        let subject = Subject::new(architecture.clone(), dtype);
        let batch = batch(3, 7, 13);
        let recorded = subject.run(&batch, Pass::Train(Checkpointing::None));
        assert!(recorded.loss.is_finite());
        for pass in [Pass::Train(Checkpointing::Full), Pass::Train(Checkpointing::Selective)] {
            assert_eq!(recorded, subject.run(&batch, pass), "{dtype}, {pass:?}");
        }
    }
}

#[test]
fn recomputation_is_bitwise_exact() {
    hf_models().iter().for_each(recomputing_changes_nothing_of);
    recomputing_changes_nothing_of(&small());
}

#[test]
fn freezing_keeps_other_gradients_bitwise() {
    for model in hf_models() {
        let mut subject = Subject::new(model, DType::F32);
        let batch = batch(2, 5, 13);
        let all = subject.run(&batch, Pass::Train(Checkpointing::None));
        for part in [".0.", ".1.", "bias", "weight", "q_proj", ".c_attn.", "wte", "embed", "norm"] {
            subject.spec = subject.architecture.description().spec.clone();
            freeze(&mut subject.spec, &[part]);
            let trained = subject.spec.params.iter().filter(|param| param.trainable).count();
            if [0, subject.spec.params.len()].contains(&trained) {
                continue;
            }
            for pass in [
                Pass::Train(Checkpointing::None),
                Pass::Train(Checkpointing::Full),
                Pass::Train(Checkpointing::Selective),
            ] {
                let some = subject.run(&batch, pass);
                assert_eq!(some.loss, all.loss);
                for ((param, some), all) in subject.spec.params.iter().zip(some.gradients).zip(&all.gradients)
                {
                    let expected = if param.trainable { all.clone() } else { vec![0.0; all.len()] };
                    assert_eq!(some, expected, "{} with {part} frozen", param.fqn);
                }
            }
        }
    }
}

#[test]
fn evaluation_applies_no_dropout() {
    let with = Subject::new(Gpt2::new(&gpt2()).unwrap(), DType::F32);
    let config = Gpt2Config { embd_pdrop: 0.0, attn_pdrop: 0.0, resid_pdrop: 0.0, ..gpt2() };
    let without = Subject::new(Gpt2::new(&config).unwrap(), DType::F32);
    let batch = batch(2, 7, 13);
    let expected = without.run(&batch, Pass::Train(Checkpointing::None)).loss;
    assert_eq!(without.run(&batch, Pass::Evaluate).loss, expected);
    assert_eq!(with.run(&batch, Pass::Evaluate).loss, expected);
    assert_ne!(with.run(&batch, Pass::Train(Checkpointing::None)).loss, expected);
}

#[test]
fn dropout_depends_only_on_step_and_sample() {
    for model in hf_models() {
        let mut subject = Subject::new(model, DType::F64);
        let both = batch(2, 7, 13);
        let part = |i: usize| Batch {
            ids: both.ids[7 * i..7 * i + 7].to_vec(),
            targets: both.targets[7 * i..7 * i + 7].to_vec(),
            samples: vec![both.samples[i]],
            seq: 7,
            positions: None,
        };
        let loss = subject.run(&both, Pass::Train(Checkpointing::None)).loss;
        let parts: f64 =
            [0, 1].map(|i| subject.run(&part(i), Pass::Train(Checkpointing::None)).loss).iter().sum();
        assert!((loss - parts).abs() < 1e-12 * loss, "{loss} {parts}");
        let other_sample = Batch { samples: vec![99], ..part(0) };
        assert_ne!(
            subject.run(&other_sample, Pass::Train(Checkpointing::None)).loss,
            subject.run(&part(0), Pass::Train(Checkpointing::None)).loss
        );
        subject.step += 1;
        assert_ne!(subject.run(&both, Pass::Train(Checkpointing::None)).loss, loss);
    }
}

#[test]
fn ignored_targets_add_no_loss_count_or_gradient() {
    let subject = Subject::new(Decoder::new(&llama()).unwrap(), DType::F32);
    let mut batch = batch(2, 7, 13);
    batch.targets.fill(crate::backend::IGNORED_TARGET);
    let outcome = subject.run(&batch, Pass::Train(Checkpointing::None));
    assert_eq!((outcome.loss, outcome.count), (0.0, 0));
    assert!(outcome.gradients.iter().flatten().all(|&gradient| gradient == 0.0));
}

#[test]
fn untied_biasless_models_recompute_bitwise() {
    let config = DecoderConfig {
        tie_word_embeddings: false,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        num_key_value_heads: 4,
        ..llama()
    };
    let llama = Decoder::new(&config).unwrap();
    assert!(llama.description().spec.params.iter().any(|param| param.fqn == "lm_head.weight"));
    recomputing_changes_nothing_of(&llama);
    let gpt2 = Gpt2::new(&Gpt2Config { tie_word_embeddings: false, ..gpt2() }).unwrap();
    recomputing_changes_nothing_of(&gpt2);
}

#[test]
fn losses_in_16_bits_are_close_to_f32() {
    for model in hf_models() {
        let full = Subject::new(model.clone(), DType::F32).run(&batch(2, 7, 13), Pass::Evaluate);
        for (dtype, share) in [(DType::Bf16, 0.02), (DType::F16, 0.0025)] {
            let half = Subject::new(model.clone(), dtype).run(&batch(2, 7, 13), Pass::Evaluate);
            assert!((full.loss - half.loss).abs() < share * full.loss, "{} {}", full.loss, half.loss);
        }
    }
}

/// A power of two changes no bit of a mantissa. The balancing loss of routers is scaled the same way.
#[test]
fn loss_scale_multiplies_only_gradients() {
    for model in hf_models() {
        let plain = Subject::new(model.clone(), DType::F32);
        let scaled = Subject { loss_scale: 1024.0, ..Subject::new(model, DType::F32) };
        for pass in [Pass::Train(Checkpointing::None), Pass::Train(Checkpointing::Full)] {
            let mut expected = plain.run(&batch(2, 7, 13), pass);
            expected.gradients.iter_mut().flatten().for_each(|value| *value *= 1024.0);
            assert_eq!(scaled.run(&batch(2, 7, 13), pass), expected);
        }
    }
}

/// Gradients that come through a norm with a small weight underflow in f16.
#[test]
fn loss_scale_preserves_small_f16_gradients() {
    let model = Decoder::new(&llama()).unwrap();
    let gradient = |dtype, loss_scale: f64| -> Vec<f64> {
        let mut subject = Subject { loss_scale, ..Subject::new(model.clone(), dtype) };
        let norm = subject.spec.params.iter().rposition(|param| param.fqn.ends_with("norm.weight")).unwrap();
        subject.values[norm].fill(2f64.powi(-20));
        let below = subject.spec.params.iter().position(|param| param.fqn.contains("down_proj")).unwrap();
        let outcome = subject.run(&batch(2, 7, 13), Pass::Train(Checkpointing::None));
        outcome.gradients[below].iter().map(|value| value / loss_scale).collect()
    };
    let expected = gradient(DType::F32, 1.0);
    let error = |got: &[f64]| got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).sum::<f64>();
    let [lost, kept] = [1.0, 4096.0].map(|loss_scale| error(&gradient(DType::F16, loss_scale)));
    let all: f64 = expected.iter().map(|value| value.abs()).sum();
    assert!(kept < 0.02 * all && lost > 5.0 * kept, "{lost} and {kept} of {all}");
}

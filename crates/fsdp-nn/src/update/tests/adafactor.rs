//! Tests Adafactor against a slow scalar reference, with various shardings.

use super::*;

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

/// Adafactor of `transformers` for one parameter, on plain matrices.
fn adafactor_reference(options: &AdafactorOptions, param: usize, p: &mut [f64], gradients: &[Vec<f64>]) {
    let (shape, len) = (SHAPES[param], p.len());
    let (rows, cols) = (shape[0], row_len(shape));
    let (mut row, mut col, mut full) = (vec![0.0; rows], vec![0.0; cols], vec![0.0; len]);
    let mut average = vec![0.0; len];
    let GroupSettings { lr_scale, weight_decay: decay, .. } = options.groups.of(ParamId(param));
    for (step, g) in (1..).zip(gradients) {
        let beta = 1.0 - f64::from(step).powf(options.decay_rate);
        let scale = mean(p.iter().map(|p| p * p)).sqrt();
        let max_rate = if options.warmup_init { 1e-6 * f64::from(step) } else { 1e-2 };
        let relative = max_rate.min(1.0 / f64::from(step).sqrt());
        let mut lr = lr_scale * if options.relative_step { relative } else { lr(step as u64) };
        if options.scale_parameter {
            lr *= scale.max(options.eps.1);
        }
        let squares: Vec<f64> = g.iter().map(|g| g * g + options.eps.0).collect();
        for i in 0..rows {
            row[i] = beta * row[i] + (1.0 - beta) * mean(squares[i * cols..(i + 1) * cols].iter().copied());
        }
        for j in 0..cols {
            col[j] = beta * col[j] + (1.0 - beta) * mean((0..rows).map(|i| squares[i * cols + j]));
        }
        full.iter_mut().zip(&squares).for_each(|(v, s)| *v = beta * *v + (1.0 - beta) * s);
        let row_mean = mean(row.iter().copied());
        let mut update: Vec<f64> = (0..len)
            .map(|i| {
                let moment =
                    if shape.len() == 2 { row[i / cols] / row_mean * col[i % cols] } else { full[i] };
                g[i] / moment.sqrt()
            })
            .collect();
        let clip = (mean(update.iter().map(|u| u * u)).sqrt() / options.clip_threshold).max(1.0);
        for i in 0..len {
            update[i] *= lr / clip;
            if let Some(beta1) = options.beta1 {
                average[i] = beta1 * average[i] + (1.0 - beta1) * update[i];
                update[i] = average[i];
            }
            p[i] = p[i] - decay * lr * p[i] - update[i];
        }
    }
}

fn check_adafactor(options: AdafactorOptions) {
    let mut expected = numbers(1, total());
    let mut start = 0;
    for (param, shape) in SHAPES.iter().enumerate() {
        let range = start..start + shape.iter().product::<usize>();
        let gradients: Vec<Vec<f64>> = (1..=STEPS).map(|step| scaled(step)[range.clone()].to_vec()).collect();
        adafactor_reference(&options, param, &mut expected[range.clone()], &gradients);
        start = range.end;
    }
    for world in [1, 2, 3] {
        let rule = Adafactor::new(options.clone(), &spec());
        assert_close(&train(rule.clone(), DType::F64, world, 1), &expected, 1e-12);
        assert_close(&train(rule.clone(), DType::F32, world, 1), &expected, 2e-5);
    }
}

#[test]
fn adafactor_matches_transformers_at_any_world_size() {
    let base = AdafactorOptions { groups: groups(0.1), ..AdafactorOptions::default() };
    check_adafactor(base.clone());
    check_adafactor(AdafactorOptions { warmup_init: true, beta1: Some(0.8), ..base.clone() });
    check_adafactor(AdafactorOptions { relative_step: false, scale_parameter: false, ..base.clone() });
    check_adafactor(AdafactorOptions { relative_step: false, clip_threshold: 0.3, ..base });
}

//! The lengths of the rows of weights, which the magnitudes of DoRA begin with and are divided by.

use std::ops::Range;

use fsdp_nn::layer::Linear;
use fsdp_nn::op::Orientation;

use super::ReadRows;
use crate::error::TrainError;

/// Elements of a weight that are read at a time (at least one row).
const PART_ELEMS: usize = 1 << 20;

/// Writes the length of the weights of each of these outputs of a linear map; `read` has the weight by rows, as it is stored.
/// Squares are summed in order, so that no length depends on which others are asked for.
///
/// # Errors
/// Those of `read`; [`TrainError::Input`] for a length that cannot be divided by.
pub(crate) fn row_lengths(
    name: &str,
    linear: &Linear,
    outputs: Range<usize>,
    read: &ReadRows<'_>,
    lengths: &mut [f64],
) -> Result<(), TrainError> {
    let (rows, row_len) = match linear.orientation {
        Orientation::OutIn => (outputs.clone(), linear.inputs),
        Orientation::InOut => (0..linear.inputs, linear.outputs),
    };
    lengths.fill(0.0);
    let block = (PART_ELEMS / row_len).max(1);
    for first in rows.clone().step_by(block) {
        let part = first..rows.end.min(first + block);
        let mut values = vec![0.0; part.len() * row_len];
        read(part.clone(), &mut values)?;
        for (row, values) in part.zip(values.chunks(row_len)) {
            match linear.orientation {
                Orientation::OutIn => {
                    lengths[row - outputs.start] = values.iter().map(|value| value * value).sum();
                }
                Orientation::InOut => {
                    let of_outputs = lengths.iter_mut().zip(&values[outputs.clone()]);
                    of_outputs.for_each(|(sum, value)| *sum += value * value);
                }
            }
        }
    }
    lengths.iter_mut().for_each(|length| *length = length.sqrt());
    let Some(at) = lengths.iter().position(|length| !length.is_normal()) else { return Ok(()) };
    Err(TrainError::Input(format!(
        "the weights of output {} of `{name}` have the length {}, and DoRA divides by it; leave the module out of \
         adapter.target_modules, or set adapter.dora to false",
        outputs.start + at,
        lengths[at]
    )))
}

#[cfg(test)]
mod tests {
    use fsdp_core::model::ParamId;

    use super::*;

    #[test]
    fn lengths_are_of_outputs_in_either_orientation_and_whatever_is_asked_for() {
        let (inputs, outputs) = (3, 4);
        let entry = |output: usize, input: usize| (output * inputs + input) as f64 - 5.0;
        for orientation in [Orientation::OutIn, Orientation::InOut] {
            let linear = Linear { weight: ParamId(0), bias: None, inputs, outputs, orientation };
            let read = |rows: Range<usize>, values: &mut [f64]| {
                let row_len = values.len() / rows.len();
                for (row, values) in rows.zip(values.chunks_mut(row_len)) {
                    for (column, value) in values.iter_mut().enumerate() {
                        *value = match orientation {
                            Orientation::OutIn => entry(row, column),
                            Orientation::InOut => entry(column, row),
                        };
                    }
                }
                Ok(())
            };
            for first in 0..outputs {
                for end in first + 1..=outputs {
                    let mut lengths = vec![f64::NAN; end - first];
                    row_lengths("w", &linear, first..end, &read, &mut lengths).unwrap();
                    let square =
                        |output: usize| (0..inputs).map(|input| entry(output, input).powi(2)).sum::<f64>();
                    let expected: Vec<f64> = (first..end).map(|output| square(output).sqrt()).collect();
                    assert_eq!(lengths, expected, "{orientation:?} {first}..{end}");
                }
            }
            let zero = |rows: Range<usize>, values: &mut [f64]| {
                read(rows.clone(), values)?;
                if orientation == Orientation::OutIn && rows.contains(&2) {
                    values[(2 - rows.start) * inputs..][..inputs].fill(0.0);
                }
                Ok(())
            };
            let refused = row_lengths("w", &linear, 1..4, &zero, &mut [0.0; 3]);
            match orientation {
                Orientation::OutIn => {
                    let error = refused.unwrap_err().to_string();
                    assert!(error.starts_with("the weights of output 2 of `w` have the length 0"), "{error}");
                }
                Orientation::InOut => refused.unwrap(),
            }
        }
    }
}

//! What the device can do, measured in the same run.

use std::time::Instant;

use ninfer_benches::Random;
use ninfer_core::backend::Synthetic;
use ninfer_core::format::ActivationPrecision;
use ninfer_core::ops::Project;
use ninfer_core::segment::{Batch, Profile, Segment};
use ninfer_core::{Backend, DType, Result, View, WeightFormat};
use ninfer_kernels::cuda::Cuda;

use crate::report::Ceilings;

/// Rows, inner dimension and tokens of the product.
const SIDE: usize = 8192;
/// Products in a recorded step, and replays of which the fastest counts.
const PRODUCTS: usize = 4;
const REPLAYS: usize = 10;

/// Bandwidth of the memory and rate of the library's own product.
pub fn measure(gpu: &Cuda) -> Result<Ceilings> {
    let rates = gpu.measure_bandwidth()?;
    Ok(Ceilings {
        copy_bytes_per_second: rates.copy.bytes_per_second,
        read_bytes_per_second: rates.read.bytes_per_second,
        product_flops: product_flops(gpu)?,
    })
}

/// Operations a second of the fastest of some products of a prompt with BF16 weights.
fn product_flops(gpu: &Cuda) -> Result<f64> {
    let mut queue = gpu.queue()?;
    let format = WeightFormat::Bf16;
    let synthetic = Synthetic { format, activations: ActivationPrecision::Native, rows: SIDE, cols: SIDE, seed: 1 };
    let Some(weight) = gpu.synthesize(&[synthetic])? else { return Ok(0.0) };
    let mut random = Random::new(2);
    let mut matrix = |fill: bool| -> Result<View<Cuda>> {
        let view = View::new(gpu.alloc("product", SIDE * SIDE * 2)?, DType::Bf16, 0, SIDE, SIDE)?;
        if fill {
            // One row of random values, shifted from row to row.
            let row: Vec<u16> = (0..2 * SIDE).map(|_| half::bf16::from_f32(random.uniform()).to_bits()).collect();
            let values: Vec<u16> = (0..SIDE).flat_map(|r| row[r..r + SIDE].iter().copied()).collect();
            gpu.upload(&mut queue, &view, bytemuck::cast_slice(&values))?;
        }
        Ok(view)
    };
    let (input, output) = (matrix(true)?, matrix(false)?);
    let segment = Segment { len: SIDE as u32, ..Segment::default() };
    let words = segment.to_words();
    let table = View::new(gpu.alloc("segments", size_of_val(&words))?, DType::I32, 0, 1, words.len())?;
    gpu.upload(&mut queue, &table, bytemuck::cast_slice(&words))?;
    let batch = Batch::new(Profile::Prefill, SIDE, table)?;
    let step = gpu.record(&mut queue, |rec| {
        for _ in 0..PRODUCTS {
            let (batch, input) = (batch.clone(), input.clone());
            rec.project(Project { batch, input, norm: None, parts: vec![(weight.clone(), output.clone())] })?;
        }
        Ok(())
    })?;
    let mut best = f64::INFINITY;
    for _ in 0..=REPLAYS {
        let start = Instant::now();
        gpu.replay(&mut queue, &step)?;
        // Nothing is copied, but the queue is waited for.
        gpu.download(&mut queue, &output.row_range(0..0)?, &mut [])?;
        best = best.min(start.elapsed().as_secs_f64() / PRODUCTS as f64);
    }
    Ok(2.0 * (SIDE as f64).powi(3) / best)
}

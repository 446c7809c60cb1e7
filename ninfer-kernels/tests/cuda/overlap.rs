//! What an operation writes overlaps nothing else that it works on: refused before anything runs, on every backend alike.

use ninfer_core::backend::{InferenceBackend, Recorder};
use ninfer_core::ops::{
    Accept, Attend, Choose, CopyRows, Count, GdnFold, GdnParams, GdnRecord, GdnState, Head, HeadArgmax, KvLayer, Norm,
    OutputGate, Project, ProjectAdd, RmsNorm,
};
use ninfer_core::sampling::PARAM_WORDS;
use ninfer_core::segment::{Batch, PAGE_TOKENS, Profile, SEGMENT_WORDS};
use ninfer_core::shape::GdnShape;
use ninfer_core::{DType, Error, Result, View, WeightFormat};
use ninfer_kernels::cpu::Cpu;

use super::lab::{Side, gpu};
use super::rng::Rng;
use super::stored::Stored;

type Work<'a, B> = &'a dyn Fn(&mut Recorder<'_, B>) -> Result<()>;

/// Refused when run and when recorded, naming the argument; the queue goes on.
#[track_caller]
fn refused<B: InferenceBackend>(side: &mut Side<B>, argument: &str, work: Work<'_, B>) {
    let run = side.backend.run(&mut side.queue, work).unwrap_err();
    let recorded = side.backend.record(&mut side.queue, work).map(|_| ()).unwrap_err();
    for error in [run, recorded] {
        assert!(matches!(&error, Error::Aliased { what, .. } if *what == argument), "{argument}: {error}");
    }
}

fn rows_of_one_buffer<B: InferenceBackend>(side: &mut Side<B>) {
    let stored = Stored::random(WeightFormat::Bf16, false, 64, 64, 0.1, &mut Rng::new(2));
    let weight = side.backend.prepare(&[stored.packed()]).unwrap();
    let whole = side.acts(8, 64, &vec![1.0; 8 * 64]);
    let apart = side.acts(4, 64, &vec![1.0; 4 * 64]);
    let before = side.bytes(&whole);
    let rows = |from: usize| whole.row_range(from..from + 4).unwrap();
    let batch = side.one(Profile::Step, 4, 0);
    let project = |input: View<B>, outputs: &[View<B>]| Project {
        batch: batch.clone(),
        input,
        norm: None,
        parts: outputs.iter().map(|y| (weight.clone(), y.clone())).collect(),
    };
    for from in [0, 3] {
        refused(side, "output", &|r| r.project(project(rows(0), &[rows(from)])));
    }
    refused(side, "output", &|r| r.project(project(apart.clone(), &[rows(4), rows(4)])));
    // Rows that interleave: the gaps between them count.
    let wide = side.acts(4, 128, &vec![1.0; 4 * 128]);
    let halves = [0..64, 64..128].map(|cols| wide.col_range(cols).unwrap());
    refused(side, "output", &|r| r.project(project(apart.clone(), &halves)));
    let add = |residual| ProjectAdd { batch: batch.clone(), input: rows(2), weight: weight.clone(), residual };
    refused(side, "residual", &|r| r.project_add(add(rows(4))));
    let norm = Norm { gain: side.floats(1, 64, &[0.0; 64]), eps: 1e-6 };
    let rms = |input, output| RmsNorm { batch: batch.clone(), input, norm: norm.clone(), output };
    refused(side, "output", &|r| r.rms_norm(rms(rows(1), rows(4))));
    let index = side.plain(DType::I32, 1, 1, &[0i32]);
    let copy = |to| CopyRows { src: rows(0), src_index: index.clone(), dst: rows(to), dst_index: index.clone() };
    refused(side, "dst", &|r| r.copy_rows(copy(3)));
    assert!(side.bytes(&whole) == before, "nothing ran");
    // Neighbours in one buffer are fine.
    side.run(|r| {
        r.copy_rows(copy(4))?;
        r.rms_norm(rms(rows(0), rows(4)))?;
        r.project(project(rows(0), &[rows(4)]))
    });
    side.check_guards();
}

/// The segment table as an output, words of sampling, state of sequences.
fn tables_and_state<B: InferenceBackend>(side: &mut Side<B>) {
    let stored = Stored::random(WeightFormat::Bf16, false, 64, 64, 0.1, &mut Rng::new(3));
    let head = side.backend.prepare(&[stored.packed()]).unwrap();
    let act = side.backend.activation_dtype();
    let again =
        |view: &View<B>, dtype, rows, cols| View::new(view.buffer().clone(), dtype, view.offset(), rows, cols).unwrap();
    let table = side.plain(DType::I32, 16, SEGMENT_WORDS, &[0i32; 16 * SEGMENT_WORDS]);
    let batch = Batch::new(Profile::Step, 1, table.row_range(0..1).unwrap()).unwrap();
    let input = side.acts(1, 64, &[1.0; 64]);
    let inside = again(&table, DType::U32, 1, 1);
    refused(side, "output", &|r| {
        let (batch, input, head) = (batch.clone(), input.clone(), head.clone());
        r.head_argmax(HeadArgmax { batch, input, head, limit: 64, output: inside.clone() })
    });
    let over_input = View::new(input.buffer().clone(), DType::F32, input.offset() - 4, 1, 64).unwrap();
    refused(side, "logits", &|r| {
        let (batch, input, head) = (batch.clone(), input.clone(), head.clone());
        r.head(Head { batch, input, head, logits: over_input.clone() })
    });
    let logits = side.floats(1, 64, &[0.0; 64]);
    let ids = side.plain(DType::U32, 1, 1, &[0u32]);
    let params = side.plain(DType::U32, 1, PARAM_WORDS, &[0u32; PARAM_WORDS]);
    let counts = side.plain(DType::U32, 1, 64, &[0u32; 64]);
    refused(side, "output", &|r| {
        r.choose(Choose {
            batch: batch.clone(),
            logits: logits.clone(),
            ids: ids.clone(),
            params: params.clone(),
            counts: counts.clone(),
            limit: 64,
            output: ids.clone(),
        })
    });
    let previous = counts.col_range(3..4).unwrap();
    refused(side, "counts", &|r| {
        let (batch, ids) = (batch.clone(), ids.clone());
        r.count(Count { batch, ids, previous: previous.clone(), counts: counts.clone() })
    });
    let results = side.plain(DType::U32, 1, 2, &[0u32; 2]);
    refused(side, "last", &|r| {
        r.accept(Accept {
            batch: batch.clone(),
            ids: ids.clone(),
            chosen: ids.clone(),
            result: results.clone(),
            realign: table.row_range(1..2).unwrap(),
            last: again(&results, DType::I32, 1, 1),
            chain: table.row_range(2..3).unwrap(),
        })
    });

    let pages = side.plain(DType::I32, 1, 1, &[0i32]);
    let kv_dtype = side.backend.kv_dtypes()[0];
    let [keys, values] = [0; 2].map(|_| side.poisoned(kv_dtype, PAGE_TOKENS, 64));
    let (query, gate) = (side.acts(1, 64, &[1.0; 64]), side.acts(1, 128, &[1.0; 128]));
    let kv = KvLayer { keys, values, scales: None, pages, heads: 1 };
    let in_gate = gate.col_range(0..64).unwrap();
    let in_pages = again(&kv.values, act, 1, 64);
    for output in [in_gate, in_pages] {
        refused(side, "output", &|r| {
            let (query, query_gate, kv) = (query.clone(), gate.clone(), kv.clone());
            r.attend(Attend { batch: batch.clone(), query, query_gate, kv, first_key: 0, output: output.clone() })
        });
    }

    let dims = GdnShape { key_heads: 1, value_heads: 1, key_dim: 32, value_dim: 32, conv_kernel: 4 };
    let floats = |side: &mut Side<B>, rows: usize, cols: usize| side.floats(rows, cols, &vec![0.0; rows * cols]);
    let matrix = floats(side, 32, 32);
    let params = GdnParams {
        dims,
        conv: floats(side, 96, 4),
        a_log: floats(side, 1, 1),
        dt_bias: matrix.row_range(3..4).unwrap().col_range(0..1).unwrap(),
        gain: floats(side, 1, 32),
        eps: 1e-6,
        gate: OutputGate::Silu,
    };
    let state = GdnState { window: side.acts(96, 3, &[0.0; 288]), matrix };
    let record = GdnRecord {
        width: 1,
        columns: side.acts(2, 96, &[0.0; 192]),
        key_value: side.acts(2, 64, &[0.0; 128]),
        gates: floats(side, 2, 2),
    };
    refused(side, "matrix", &|r| {
        let (batch, params) = (batch.clone(), params.clone());
        r.gdn_fold(GdnFold { batch, params, state: state.clone(), record: record.clone() })
    });
    side.check_guards();
}

#[test]
fn the_cpu_refuses_overlapping_views() {
    rows_of_one_buffer(&mut Side::cpu());
    tables_and_state(&mut Side::new(Cpu::new()));
}

#[test]
fn a_gpu_refuses_overlapping_views() {
    let Some(gpu) = gpu() else { return };
    rows_of_one_buffer(&mut Side::new(gpu.clone()));
    tables_and_state(&mut Side::new(gpu));
}

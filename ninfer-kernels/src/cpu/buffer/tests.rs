use std::sync::mpsc;
use std::thread;

use super::*;

fn buffer(len: usize) -> CpuBuffer {
    CpuBuffer::new("test", len).unwrap()
}

fn view(buffer: &CpuBuffer, offset: usize, rows: usize, cols: usize) -> View<Cpu> {
    View::new(buffer.clone(), DType::F32, offset, rows, cols).unwrap()
}

fn users(buffer: &CpuBuffer) -> isize {
    buffer.0.users.load(Ordering::SeqCst)
}

#[test]
fn buffers_begin_at_64_and_are_zero() {
    for len in [0, 1, 63, 64, 65, 1000] {
        let b = buffer(len);
        assert_eq!(b.pointer() as usize % 64, 0);
        let all = View::new(b, DType::U8, 0, 1, len).unwrap();
        assert_eq!(Access::new("test").read_bytes("all", &all).unwrap(), vec![0; len]);
    }
}

#[test]
fn memory_that_does_not_exist_is_an_error() {
    let error = CpuBuffer::new("everything", usize::MAX / 2).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
}

#[test]
fn readers_share_and_writers_do_not() {
    let b = buffer(64);
    let v = view(&b, 0, 2, 4);
    let (first, second) = (Access::new("first"), Access::new("second"));
    first.read::<f32>("x", &v).unwrap();
    second.read::<f32>("x", &v).unwrap();
    assert_eq!(users(&b), 2);
    let writer = Access::new("writer");
    assert_eq!(writer.write::<f32>("x", &v).unwrap_err(), Error::BufferBusy);
    // A refused access holds nothing.
    drop(writer);
    drop(first);
    assert_eq!(users(&b), 1);
    // With another reader gone, the remaining one may become the writer of another part, and then nobody else enters.
    let other = view(&b, 32, 1, 4);
    second.write::<f32>("y", &other).unwrap()[0] = 5.0;
    assert_eq!(users(&b), -1);
    assert_eq!(Access::new("late").read::<f32>("x", &v).unwrap_err(), Error::BufferBusy);
    assert_eq!(Access::new("late").write::<f32>("x", &v).unwrap_err(), Error::BufferBusy);
    drop(second);
    assert_eq!(users(&b), 0);
    assert_eq!(Access::new("after").read::<f32>("y", &other).unwrap()[0], 5.0);
}

#[test]
fn a_reader_cannot_become_a_writer_beside_another() {
    let b = buffer(64);
    let (first, second) = (Access::new("first"), Access::new("second"));
    first.read::<f32>("x", &view(&b, 0, 1, 4)).unwrap();
    second.read::<f32>("x", &view(&b, 0, 1, 4)).unwrap();
    assert_eq!(first.write::<f32>("y", &view(&b, 32, 1, 4)).unwrap_err(), Error::BufferBusy);
    drop((first, second));
    assert_eq!(users(&b), 0);
}

/// Two threads, one of which holds the buffer until the other has tried.
#[test]
fn threads_get_busy_instead_of_a_race() {
    let b = buffer(256);
    let (held, tried) = (mpsc::channel(), mpsc::channel::<()>());
    thread::scope(|scope| {
        let mine = b.clone();
        scope.spawn(move || {
            let access = Access::new("holder");
            access.write::<f32>("x", &view(&mine, 0, 1, 8)).unwrap().fill(3.0);
            held.0.send(()).unwrap();
            tried.1.recv().unwrap();
        });
        held.1.recv().unwrap();
        // Also for bytes that the other thread does not touch: a buffer is held as a whole.
        let error = Access::new("other").read::<f32>("y", &view(&b, 128, 1, 8)).unwrap_err();
        assert_eq!(error, Error::BufferBusy);
        tried.0.send(()).unwrap();
    });
    assert_eq!(Access::new("after").read::<f32>("x", &view(&b, 0, 1, 8)).unwrap(), [3.0; 8]);
}

#[test]
fn a_panic_releases_the_buffer() {
    let b = buffer(64);
    let shared = b.clone();
    let panicking = thread::spawn(move || {
        let access = Access::new("panics");
        let x = access.write::<f32>("x", &view(&shared, 0, 1, 4)).unwrap();
        assert!(x[0] != 0.0, "as intended");
    });
    assert!(panicking.join().is_err());
    assert_eq!(users(&b), 0);
}

#[test]
fn written_ranges_overlap_nothing() {
    let b = buffer(256);
    let whole = view(&b, 0, 4, 8);
    let (left, right) = (whole.col_range(0..3).unwrap(), whole.col_range(5..8).unwrap());
    let access = Access::new("op");
    access.read::<f32>("left", &left).unwrap();
    // Overlapping reads are fine; a write between the rows of another view is not, since its range covers the gaps.
    access.read::<f32>("whole", &whole).unwrap();
    assert_eq!(access.write::<f32>("right", &right).unwrap_err(), Error::Aliased { op: "op", what: "right" });
    let below = view(&b, 128, 1, 8);
    access.write::<f32>("below", &below).unwrap();
    assert_eq!(access.read::<f32>("below", &below).unwrap_err(), Error::Aliased { op: "op", what: "below" });
    assert_eq!(access.write::<f32>("below", &below).unwrap_err(), Error::Aliased { op: "op", what: "below" });
    // Neighbours that only touch are fine.
    access.write::<f32>("next", &view(&b, 160, 1, 8)).unwrap();
}

#[test]
fn empty_views_are_empty_wherever_they_stand() {
    let b = buffer(128);
    let columns = view(&b, 0, 4, 8).col_range(4..8).unwrap();
    // Its offset lies behind the buffer.
    let behind = columns.row_range(4..4).unwrap();
    assert!(behind.offset() > b.len());
    let access = Access::new("op");
    access.write::<f32>("whole", &view(&b, 0, 4, 8)).unwrap();
    for empty in [behind, columns.col_range(2..2).unwrap(), columns.row_range(1..1).unwrap()] {
        assert!(access.read::<f32>("empty", &empty).unwrap().is_empty());
        assert!(access.write::<f32>("empty", &empty).unwrap().is_empty());
        assert!(access.read_bytes("empty", &empty).unwrap().is_empty());
    }
}

#[test]
fn types_and_shapes_are_checked() {
    let b = buffer(128);
    let v = view(&b, 0, 4, 8);
    let access = Access::new("op");
    let wrong = Error::WrongDType { op: "op", what: "x", expected: DType::U32, got: DType::F32 };
    assert_eq!(access.read::<u32>("x", &v).unwrap_err(), wrong);
    assert!(matches!(access.read_dense::<f32>("x", &v.col_range(0..7).unwrap()), Err(Error::Shape { .. })));
    assert!(access.read_dense::<f32>("x", &v.row_range(0..1).unwrap().col_range(0..7).unwrap()).is_ok());
    assert!(matches!(access.write_matrix::<f32>("x", &v, 4, 9), Err(Error::Shape { .. })));
    assert_eq!(users(&b), 1);
}

#[test]
fn an_operation_has_a_limited_number_of_views() {
    let b = buffer(1024);
    let access = Access::new("op");
    for i in 0..MAX_VIEWS {
        access.read::<f32>("x", &view(&b, i * 4, 1, 1)).unwrap();
    }
    assert!(matches!(access.read::<f32>("x", &view(&b, 0, 1, 1)), Err(Error::Shape { .. })));
    drop(access);
    assert_eq!(users(&b), 0);
}

//! Tokenizer, template and end tokens from the resources of a container.

use ninfer_models::text::{ChatOptions, Message, Text, TextError};
use ninfer_quant::container::ContainerFormat;

use crate::file::{Objects, fixture};

fn tokenizer_file(name: &str) -> Vec<u8> {
    std::fs::read(fixture("tokenizer").join(name)).unwrap()
}

fn write(resources: &[(&str, &[u8])]) -> (tempfile::TempDir, std::path::PathBuf) {
    let mut objects = Objects::default();
    objects.tensor("x", ContainerFormat::F32, &[], vec![0; 4]);
    for (name, bytes) in resources {
        objects.resource(name, bytes);
    }
    objects.write(2, "tiny-dense")
}

#[test]
fn resources_say_what_files_of_a_folder_say() {
    let (tokenizer, config) = (tokenizer_file("tokenizer.json"), tokenizer_file("tokenizer_config.json"));
    let generation = tokenizer_file("generation_config.json");
    let (_dir, path) = write(&[
        ("frontend/tokenizer.json", &tokenizer),
        ("frontend/tokenizer_config.json", &config),
        ("frontend/chat_template.jinja", b"{{ messages[0].content }}!"),
        ("frontend/generation_config.json", &generation),
    ]);
    let text = Text::load(&path).unwrap();
    assert_eq!(text.tokenizer().len(), 512);
    assert_eq!(text.stop_tokens().ids(), [479, 481]);
    assert_eq!(text.defaults().top_k, Some(20));
    assert_eq!(text.render(&[Message::user("hi")], &ChatOptions::new()).unwrap().text, "hi!");
}

#[test]
fn what_a_container_lacks_is_looked_for_beside_it() {
    let (dir, path) = write(&[]);
    assert!(matches!(Text::load(&path), Err(TextError::Missing { file }) if file == dir.path().join("tokenizer.json")));
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer_file("tokenizer.json")).unwrap();
    let text = Text::load(&path).unwrap();
    assert!(matches!(text.chat_template(), Err(TextError::NoChatTemplate { dir: d }) if d == dir.path()));
    // A resource comes before a file, and errors name it.
    let (_dir, path) = write(&[("frontend/tokenizer.json", b"{}")]);
    assert!(Text::load(&path).is_err());
    let tokenizer = tokenizer_file("tokenizer.json");
    let (_dir, path) = write(&[("frontend/tokenizer.json", &tokenizer), ("frontend/generation_config.json", b"{")]);
    let error = Text::load(&path).unwrap_err().to_string();
    assert!(error.contains("tiny.ninfer/frontend/generation_config.json"), "{error}");
    std::fs::write(&path, b"NINFER").unwrap();
    assert!(matches!(Text::load(&path), Err(TextError::Unreadable { .. })));
}

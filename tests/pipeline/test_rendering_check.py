"""The rendering check: nothing starts where the server would have made other ids of the same chat."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from pipeline.config import Config
from pipeline.errors import StageError
from pipeline.render import Renderer, RenderError
from pipeline.rendering_check import require_same_rendering
from tests.tiny import BOS, CHAT_TEMPLATE, SPECIAL, _tokenizer, tiny_target

THINKS = "{% if enable_thinking is defined and not enable_thinking %}<t></t>{% endif %}"
NO_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"


def model_folder(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    folder.mkdir(exist_ok=True)
    _tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Server(ThreadingHTTPServer):
    """Answers /tokenize with what ``ids_of(body)`` makes of it; keeps the bodies."""

    def __init__(self, ids_of):
        self.bodies = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append((self.path, body))
                status, answer = ids_of(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def serve():
    servers = []

    def start(ids_of):
        servers.append(Server(ids_of))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def tokenizes_with(folder):
    """A server whose template and tokenizer are this folder's."""
    renderer = Renderer(folder)

    def ids_of(body):
        try:
            arguments = {"tools": body.get("tools"), "template_args": body.get("chat_template_kwargs")}
            return 200, {"tokens": renderer.prompt_ids(body["messages"], **arguments)}
        except RenderError as error:
            return 400, {"error": str(error)}

    return ids_of


def check(folder, url):
    config = Config(target={"model": folder}, regenerate={"rendering_url": url})
    require_same_rendering(config, Renderer(folder), None)


def test_case_102_three_probe_chats_that_render_alike_let_the_run_begin(tmp_path, serve):
    server = serve(tokenizes_with(model_folder(tmp_path / "served")))
    check(model_folder(tmp_path / "ours"), server.url + "/")
    assert [path for path, _ in server.bodies] == ["/tokenize"] * 3
    assert all(body["add_generation_prompt"] and not body["add_special_tokens"] for _, body in server.bodies)
    assert [bool(body.get("tools")) for _, body in server.bodies] == [False, False, True]
    assert len(server.bodies[1][1]["messages"]) > 2


@pytest.mark.parametrize(
    ("served", "ours", "probe"),
    [
        (CHAT_TEMPLATE + " ", CHAT_TEMPLATE, "plain"),
        (CHAT_TEMPLATE.replace("'assistant'", "'system'"), CHAT_TEMPLATE, "system and turns"),
        (CHAT_TEMPLATE + THINKS, CHAT_TEMPLATE, "tools and template arguments"),
        (CHAT_TEMPLATE + "{% for tool in tools or [] %}{{ tool }}{% endfor %}", CHAT_TEMPLATE, "tools and template"),
        (CHAT_TEMPLATE + NO_TOOLS, CHAT_TEMPLATE, "tools and template arguments"),
    ],
    ids=["text", "turns", "thinking", "tools", "refused"],
)
def test_case_102_a_template_that_differs_in_turns_tools_or_thinking_stops_the_run(
    tmp_path, serve, served, ours, probe
):
    server = serve(tokenizes_with(model_folder(tmp_path / "served", served)))
    with pytest.raises(StageError, match=f"{probe}.*copy the tokenizer's files and the chat template"):
        check(model_folder(tmp_path / "ours", ours), server.url)


def test_the_first_position_that_differs_is_named_with_both_ids(tmp_path, serve):
    ours = model_folder(tmp_path / "ours")

    def one_token_off(body):
        status, answer = tokenizes_with(ours)(body)
        answer["tokens"][3] = 99
        return status, answer

    own = Renderer(ours).prompt_ids([{"role": "user", "content": "Grüße! What's 2 + 2?"}])
    with pytest.raises(StageError, match=rf"'plain'.*position 3 is token 99 of {len(own)} at .*token {own[3]} of"):
        check(ours, serve(one_token_off).url)


def test_case_54_a_server_that_begins_with_two_bos_stops_the_run(tmp_path, serve):
    ours = model_folder(tmp_path / "ours")
    tokenizer = Tokenizer.from_file(str(ours / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, SPECIAL.index(BOS))]
    )
    tokenizer.save(str(ours / "tokenizer.json"))  # template and tokenizer would each add one

    def twice(body):
        _, answer = tokenizes_with(ours)(body)
        return 200, {"tokens": [SPECIAL.index(BOS), *answer["tokens"]]}

    with pytest.raises(StageError, match="position 1 is token 0"):
        check(ours, serve(twice).url)
    check(ours, serve(tokenizes_with(ours)).url)


def test_what_both_sides_refuse_is_no_difference_unless_they_refuse_everything(tmp_path, serve):
    without = model_folder(tmp_path / "without", CHAT_TEMPLATE + NO_TOOLS)
    check(without, serve(tokenizes_with(without)).url)
    nothing = model_folder(tmp_path / "nothing", "{{ raise_exception('no chat') }}")
    with pytest.raises(StageError, match=r"no probe chat has a rendering.*no chat"):
        check(nothing, serve(tokenizes_with(nothing)).url)


@pytest.mark.parametrize("answer", [(404, {}), (500, {"error": "busy"}), (200, {"ids": []})])
def test_a_server_that_cannot_be_asked_stops_the_run_and_says_what_is_expected(tmp_path, serve, answer):
    server = serve(lambda body: answer)
    with pytest.raises(StageError, match=r"/tokenize.*regenerate\.rendering_url must be the base URL"):
        check(model_folder(tmp_path / "ours"), server.url)


def test_a_url_that_nobody_answers_stops_the_run(tmp_path, serve):
    server = serve(lambda body: (200, {}))
    url = server.url
    server.shutdown()
    server.server_close()
    with pytest.raises(StageError, match="cannot be asked"):
        check(model_folder(tmp_path / "ours"), url)


def test_a_real_engines_own_chat_route_is_compared_where_there_is_no_url(tmp_path):
    from vllm.distributed import cleanup_dist_env_and_memory

    from jobs.target_engine import TargetEngine

    target = tiny_target(tmp_path / "target", layers=2)
    (target / "chat_template.jinja").write_text(CHAT_TEMPLATE + THINKS + NO_TOOLS)
    engine = TargetEngine(target, dtype="float32", max_model_len=256, kv_cache_gib=0.25, num_threads=1)
    config = Config(target={"model": target})
    try:
        require_same_rendering(config, Renderer(target), engine)
        other = Renderer(model_folder(tmp_path / "other", CHAT_TEMPLATE + " "))
        with pytest.raises(StageError, match=r"'plain' differs: position .* at the engine, and"):
            require_same_rendering(config, other, engine)
    finally:
        del engine
        cleanup_dist_env_and_memory()

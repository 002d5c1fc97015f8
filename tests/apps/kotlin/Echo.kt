/* Checks of the Kotlin API and its JNI against echo.c. Prints a line for each: what was seen. */
package edge.runtime

import kotlin.concurrent.thread
import kotlinx.coroutines.CompletableDeferred
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Deferred
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.async
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.delay
import kotlinx.coroutines.flow.collect
import kotlinx.coroutines.flow.onEach
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

private const val LONG = "slow and long, "

private fun show(name: String, value: Any?) = println("$name=$value")

private fun failure(work: suspend () -> Unit): String = try {
    runBlocking { work() }
    "none"
} catch (failed: EdgeException) {
    "${failed.status}: ${failed.message}"
} catch (failed: RuntimeException) { // IllegalArgumentException, IllegalStateException
    "${failed.message}"
}

private fun text(session: EdgeSession, prompt: String): String =
    runBlocking { session.answer(prompt).toList().joinToString("") }

private fun values(model: EdgeModel) = runBlocking {
    show("info", model.info)
    val options = EdgeOptions(
        threads = 3, cpuMask = 1L shl 40, isa = "avx2", temperature = 0.5, topK = 7, topP = 0.25, minP = 0.125,
        repeatPenalty = 1.5, seed = -1, maxTokens = 9, speculate = Speculate.OFF, stop = listOf("a", "ä😀"), time = 1.0,
        energy = 2.0, power = 3.0, maxTemp = 4.0, headroom = 0.5, engine = Engine.GPU, cache = "files/ä", npu = "ö",
    )
    val sensors = Sensors { Readings(1.0, 2.0, 3.0, 1 shl 30) }
    model.session(options, sensors).use { session ->
        show("unread", session.usage())
        text(session, "a")
        show("read", session.usage())
        session.set(EdgeOptions())
        show("defaults", session.usage())
        show("vector", session.embed("a\u0000é", "query", normalize = false, truncate = true).toList())
        show("vectors", session.embed(List(100) { "x".repeat(it) }, dimensions = 2).map { it.sum() }.sum())
        show("too few", failure { session.embed("x", dimensions = -1) })
        session.constrain(Form.REGEX, "é")
        show("form", failure { session.constrain(Form.JSON_SCHEMA, "{}") })
        show("bias", failure { session.bias(mapOf(3 to 2f, 7 to -1.5f)) })
        show("free", failure { session.constrain(Form.FREE) })
        session.tools("[é]")
        show("tools", failure { session.tools("[]") })
        session.tools(null)
        session.choose("auto", parallel = false)
        show("choice", failure { session.choose("é") })
        show("calls", session.calls().map { "${it.id} ${it.name} ${it.arguments}" })
        show("result", session.answerResults(listOf("done")).toList().joinToString("") { it.text })
        show("ids", session.tokenize("é").toList() + session.tokenize("a", special = true).toList())
        session.append("Hi".map { it.code }.toIntArray())
        show("appended ids", session.answer().toList())
        session.append(Role.RAW, "later 😀")
        val state = session.save()
        session.load(state)
        show("loaded", session.answer().toList().joinToString("") { it.text })
        val adapters = mutableListOf<Long>()
        session.setAdapter("ab".encodeToByteArray(), 0.5)
        adapters += session.usage().lora
        session.setAdapter(7)
        adapters += session.usage().lora
        session.setAdapter(byteArrayOf(97))
        adapters += session.usage().lora
        session.setAdapter(null)
        show("adapters", adapters + session.usage().lora)
        show("adapter", failure { session.setAdapter(null, 1e7) })
        session.reset()
        show("rewind", failure { session.rewind(2) })
        session.trim(Trim.ALL)
    }
    EdgeModel.open(fd = 7, offset = 64, length = 128).close()
}

private fun texts(model: EdgeModel) = model.session().use { session ->
    for (each in listOf("😀 𝄞 e\u0301 日本", "", "\u0000nul\u0000", "a\uD800b", "x".repeat(100_000)))
        show("echo", text(session, each).let { if (it.length < 100) it else it.length })
}

private fun errors(model: EdgeModel) {
    show("missing", failure { EdgeModel.open("/missing/😀") })
    show("nul", failure { EdgeModel.open("a\u0000b") })
    show("named", failure { model.session().append(Role.RAW, "names") })
    show("stop", failure { model.session(EdgeOptions(stop = listOf("x".repeat(1000)))) })
    show("stops", failure { model.session(EdgeOptions(stop = List(40) { "x" })) })
    show("threads", failure { EdgeOptions(threads = 0) })
    val session = model.session()
    show("nothing asked", failure { session.answer().collect() })
    show("failed", failure { text(session, "NaN") })
    show("failed finish", session.finish)
    show("after", text(session, "after"))
    show("too long", failure { text(session, "x".repeat(2_000_000)) })
    session.close()
    session.close()
    show("closed", failure { session.append(Role.USER, "a") })
    session.trim(Trim.SOFT)
    session.cancel()
    show("closed answer", text(session, "a") + session.finish)
}

private fun cancellations(model: EdgeModel) = runBlocking {
    val session = model.session()
    show("three", session.answer(LONG.repeat(100)).take(3).toList().joinToString(""))
    show("three finish", session.finish)
    show("next", text(session, "next"))
    val job = begin(session)
    show("busy", failure { session.append(Role.USER, "a") })
    session.trim(Trim.SOFT)
    show("busy answer", failure { text(session, "a") })
    delay(100)
    show("busy finish", session.finish)
    job.cancelAndJoin()
    show("job", "${job.isCancelled} ${session.finish}")
    val cancelled = begin(session)
    session.cancel()
    show("cancel", "${cancelled.await() < 1000} ${session.finish}")
    val closed = begin(session)
    session.close()
    show("close", "${closed.await() < 1000} ${session.finish}")
}

/* A long answer on another thread, of which the first piece has come; its result is the number of pieces. */
private suspend fun CoroutineScope.begin(session: EdgeSession): Deferred<Int> {
    val started = CompletableDeferred<Unit>()
    val answer = async(Dispatchers.Default) {
        session.answer(LONG.repeat(1000)).onEach { started.complete(Unit) }.toList().size
    }
    started.await()
    return answer
}

/* Threads that answer, cancel, close, trim and look, at random; no call may come too late or at the same time. */
private fun storm(model: EdgeModel) {
    repeat(25) { round ->
        val session = model.session()
        val threads = List(4) { i ->
            thread {
                val random = kotlin.random.Random(round * 4 + i)
                repeat(20) {
                    try {
                        when (random.nextInt(8)) {
                            0, 1 -> runBlocking { session.answer("slow?").take(1 + random.nextInt(3)).collect() }
                            2 -> text(session, "some words")
                            3 -> session.cancel()
                            4 -> session.trim(Trim.SOFT)
                            5 -> session.usage()
                            6 -> runBlocking { session.append(Role.USER, "a") }
                            else -> if (random.nextInt(8) == 0) session.close()
                        }
                    } catch (busy: IllegalStateException) {
                    }
                }
            }
        }
        threads.forEach { it.join() }
        session.close()
    }
    show("faults", model.session().use { it.usage().evicted })
}

fun main() {
    val model = EdgeModel.open("/data/model.edge")
    values(model)
    texts(model)
    errors(model)
    cancellations(model)
    storm(model)
    val left = model.session()
    runBlocking {
        val answer = begin(left)
        model.close() // ends the session, too
        model.close()
        answer.join()
    }
    show("left", left.finish)
    show("model closed", failure { model.session() })
}

package com.example.chat

import edge.runtime.EdgeException
import edge.runtime.EdgeOptions
import edge.runtime.EdgeSession
import edge.runtime.Finish
import edge.runtime.Hearing
import edge.runtime.Piece
import edge.runtime.Status
import edge.runtime.ToolCall
import edge.runtime.answerResults
import edge.runtime.calls
import edge.runtime.choose
import edge.runtime.decoded
import edge.runtime.fill
import edge.runtime.image
import edge.runtime.tool
import edge.runtime.tools
import edge.runtime.transcribe
import java.io.Closeable
import java.io.File
import java.io.IOException
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.asStateFlow
import kotlinx.coroutines.flow.takeWhile
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext
import kotlinx.serialization.SerializationException
import kotlinx.serialization.json.Json

/** What the chat wants of the device it is on. */
interface Device : Closeable {
    /** Opens the model and begins a conversation, on a thread that may block. */
    fun begin(options: EdgeOptions): EdgeSession

    /** The path of a file of the bundle; null if it has none: eyes.edge, ears.edge. On a thread that may block. */
    fun find(name: String): String?

    fun setTimer(timer: Timer)

    /** 16-bit samples of the microphone, mono, until the collector has enough. */
    fun listen(rate: Int): Flow<ShortArray>
}

/**
 * The conversation. A ViewModel holds it through rotations, [keep] and [file] through the end of the process. Its functions
 * belong to the main thread, whose [scope] it cancels in the end.
 */
class Chat(private val device: Device, private val file: File, private val scope: CoroutineScope) : Closeable {
    val screen: StateFlow<Screen> get() = shown.asStateFlow()
    private val shown = MutableStateFlow(Screen())
    private var session: EdgeSession? = null
    private var eyes: String? = null
    private var ears: String? = null
    private var picture: Picture? = null
    private var answer: Job? = null
    private var closed = false

    @Volatile private var listening = false

    init {
        scope.launch(NonCancellable) { open() }
    }

    private suspend fun open() = try {
        val begun = withContext(Dispatchers.IO) {
            eyes = device.find("eyes.edge")
            ears = device.find("ears.edge")
            device.begin(EdgeOptions(maxTokens = 512, headroom = 0.9))
        }
        if (closed) {
            begun.close()
        } else {
            val takesTools = eyes == null && ears == null && stateTools(begun)
            val turns = restore(begun)
            session = begun
            shown.value = Screen(
                Screen.Phase.READY,
                turns,
                modes = listOfNotNull(Mode.CHAT, Mode.TIMER.takeIf { takesTools }, Mode.FORM.takeIf { ears == null }),
                sees = eyes != null,
                hears = ears != null,
            )
        }
    } catch (failed: IOException) {
        fail(failed)
    } catch (failed: EdgeException) {
        fail(failed)
    }

    private fun fail(failed: Exception) =
        shown.update { it.copy(phase = Screen.Phase.FAILED, status = "${failed.message}") }

    /** False for models whose chat template writes tools in a notation of its own. */
    private suspend fun stateTools(begun: EdgeSession) = try {
        begun.tools(listOf(tool<Timer>("set_timer", "Sets a timer", "minutes" to """{"minimum": 1, "maximum": 600}""")))
        true
    } catch (failed: EdgeException) {
        if (failed.status != Status.UNSUPPORTED) throw failed
        false
    }

    /** A picture for the next question. */
    fun show(picture: Picture) {
        this.picture = picture
        shown.update { it.copy(picture = true) }
    }

    fun ask(question: String, mode: Mode) = work(question) { session ->
        val seen = picture
        picture = null // also if it is refused
        shown.update { it.copy(picture = false) }
        seen?.let { session.image(it.colors, it.width, it.height, checkNotNull(eyes)) }
        if (Mode.TIMER in shown.value.modes) session.choose(mode.choice, parallel = mode == Mode.CHAT)
        when (mode) {
            Mode.FORM -> {
                val booking = session.fill<Booking>(question, "people" to """{"minimum": 1, "maximum": 20}""")
                say(Turn(Turn.By.APP, "A table is booked.", booking.fields()))
            }
            Mode.TIMER -> timed(session, question)
            Mode.CHAT -> {
                write(session.pieces(question))
                if (session.finish == Finish.TOOL_CALLS) write(session.answerResults(session.calls().map { run(it) }))
            }
        }
    }

    private suspend fun timed(session: EdgeSession, question: String) {
        write(session.pieces(question))
        val results = session.calls().map { run(it) }
        session.choose("none")
        if (results.isNotEmpty()) write(session.answerResults(results))
    }

    /** Calls a function of the app; returns its result as the model reads it. */
    private fun run(call: ToolCall): String = try {
        val timer = call.decoded<Timer>()
        device.setTimer(timer)
        say(Turn(Turn.By.APP, "${call.name}: ${timer.minutes} minutes"))
        "The timer is set to ${timer.minutes} minutes."
    } catch (failed: SerializationException) {
        "Error: ${failed.message}"
    }

    /** Writes what is said, with a model that hears, until [cancel]. */
    fun listen() = work(null) { session ->
        val hearing = Hearing(rate = RATE, live = true)
        listening = true
        val sound = device.listen(RATE).takeWhile { listening }
        session.transcribe(sound, hearing, checkNotNull(ears)).collect { append("${it.text}\n") }
    }

    private fun work(question: String?, work: suspend (EdgeSession) -> Unit) {
        val session = session ?: return
        if (shown.value.phase != Screen.Phase.READY || question?.isBlank() == true) return
        val asked = question?.let { Turn(Turn.By.PERSON, it) }
        shown.update { it.copy(phase = Screen.Phase.ANSWERING, turns = it.turns + listOfNotNull(asked)) }
        answer = scope.launch {
            try {
                work(session)
            } catch (failed: EdgeException) {
                say(Turn(Turn.By.APP, "${failed.message}"))
            } catch (failed: SerializationException) {
                say(Turn(Turn.By.APP, "The answer was cut: ask again."))
            } finally {
                if (!closed) shown.update { it.copy(phase = Screen.Phase.READY, status = summary(session)) }
            }
        }
    }

    private suspend fun write(pieces: Flow<Piece>) = pieces.collect { piece ->
        if (piece.text.isNotEmpty()) append(piece.text)
        if (piece.done < piece.asked) {
            shown.update { it.copy(status = "Reading: ${piece.done} of ${piece.asked} tokens") }
        }
    }

    /** Adds to the model's turn, which begins with the first text. */
    private fun append(text: String) = shown.update {
        val last = it.turns.lastOrNull()?.takeIf { turn -> turn.by == Turn.By.MODEL }
        val before = if (last == null) it.turns else it.turns.dropLast(1)
        it.copy(turns = before + Turn(Turn.By.MODEL, (last?.text ?: "") + text))
    }

    private fun say(turn: Turn) = shown.update { it.copy(turns = it.turns + turn) }

    fun cancel() {
        if (ears != null) listening = false else answer?.cancel() // what was said before is still written
    }

    private fun summary(session: EdgeSession): String {
        val use = session.usage()
        val energy = "%.1f J %s".format(use.joules, if (use.measured) "measured" else "estimated")
        val memory = (use.weights + use.kv + use.scratch) shr 20
        return "${session.finish ?: "failed"}, $memory MiB, ${use.rows} KV rows, $energy"
    }

    /** Keeps the conversation for the next process, when a running answer has ended. */
    fun keep(): Job = scope.launch {
        answer?.join()
        try {
            val state = session?.takeIf { ears == null }?.save() ?: return@launch
            val said = Json.encodeToString(shown.value.turns).encodeToByteArray()
            withContext(Dispatchers.IO) {
                val part = File(file.path + ".part")
                part.outputStream().buffered().use { it.write("${said.size}\n".encodeToByteArray() + said + state) }
                part.renameTo(file)
            }
        } catch (failed: IOException) {
            shown.update { it.copy(status = "${failed.message}") } // what was kept before stays
        } catch (failed: EdgeException) {
            shown.update { it.copy(status = "${failed.message}") }
        }
    }

    /** What was said; nothing if there is no conversation, or it is another model's, or damaged. */
    private suspend fun restore(begun: EdgeSession): List<Turn> {
        val bytes = withContext(Dispatchers.IO) { if (file.exists()) file.readBytes() else byteArrayOf() }
        val line = bytes.indexOf('\n'.code.toByte())
        val size = bytes.decodeToString(0, maxOf(0, line)).toIntOrNull() ?: return emptyList()
        return try {
            val turns = Json.decodeFromString<List<Turn>>(bytes.decodeToString(line + 1, line + 1 + size))
            begun.load(bytes.copyOfRange(line + 1 + size, bytes.size))
            turns
        } catch (failed: EdgeException) {
            emptyList()
        } catch (failed: IllegalArgumentException) { // SerializationException is one
            emptyList()
        } catch (failed: IndexOutOfBoundsException) {
            emptyList()
        }
    }

    /** A running answer ends before its next token. */
    override fun close() {
        closed = true
        scope.cancel()
        device.close()
        session?.close()
    }

    private companion object {
        const val RATE = 16_000
    }
}

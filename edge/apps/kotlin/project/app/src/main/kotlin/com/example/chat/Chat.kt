package com.example.chat

import android.content.Context
import edge.runtime.AndroidSensors
import edge.runtime.EdgeException
import edge.runtime.EdgeModel
import edge.runtime.EdgeOptions
import edge.runtime.EdgeSession
import edge.runtime.fromAssets
import edge.runtime.trimInBackground
import java.io.Closeable
import java.io.File
import java.io.IOException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.cancel
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

/**
 * The conversation. It outlives its activity through rotations, as a retained instance or, with AndroidX, as a ViewModel, and the
 * process by a file. Its functions belong to the main thread.
 */
class Chat(context: Context) : Closeable {
    enum class Phase { LOADING, READY, ANSWERING, FAILED }

    val phase = MutableStateFlow(Phase.LOADING)
    val text = MutableStateFlow("")
    val status = MutableStateFlow("")
    private val application = context.applicationContext
    private val file = File(application.noBackupFilesDir, "conversation")
    private val scope = MainScope()
    private var session: EdgeSession? = null
    private var trimming: Closeable? = null
    private var answer: Job? = null
    private var closed = false

    init {
        scope.launch(NonCancellable) { open() }
    }

    private suspend fun open() = try {
        val begun = withContext(Dispatchers.IO) { model(application).session(OPTIONS, AndroidSensors(application)) }
        if (closed) {
            begun.close()
        } else {
            text.value = restore(begun)
            trimming = begun.trimInBackground(application)
            session = begun
            phase.value = Phase.READY
        }
    } catch (failed: IOException) {
        fail(failed)
    } catch (failed: EdgeException) {
        fail(failed)
    }

    private fun fail(failed: Exception) {
        phase.value = Phase.FAILED
        status.value = "${failed.message}"
    }

    fun ask(question: String) {
        val session = session ?: return
        if (phase.value != Phase.READY || question.isBlank()) return
        text.value += "\n> $question\n"
        phase.value = Phase.ANSWERING
        answer = scope.launch {
            try {
                session.pieces(question).collect { piece ->
                    text.value += piece.text
                    if (piece.done < piece.asked) status.value = "Reading: ${piece.done} of ${piece.asked} tokens"
                }
            } catch (failed: EdgeException) {
                text.value += "\n${failed.message}\n"
            } finally {
                if (!closed) status.value = summary(session)
                phase.value = Phase.READY
            }
        }
    }

    fun cancel() {
        answer?.cancel()
    }

    private fun summary(session: EdgeSession): String {
        val use = session.usage()
        val energy = "%.1f J %s".format(use.joules, if (use.measured) "measured" else "estimated")
        return "${session.finish ?: "failed"}, ${(use.weights + use.kv + use.scratch) shr 20} MiB, ${use.rows} KV rows, $energy"
    }

    /** Keeps the conversation for the next process, when a running answer has ended. */
    fun keep(): Job = scope.launch {
        answer?.join()
        val state = session?.save() ?: return@launch
        val said = text.value.encodeToByteArray()
        withContext(Dispatchers.IO) {
            val part = File(file.path + ".part")
            part.outputStream().buffered().use { it.write("${said.size}\n".encodeToByteArray() + said + state) }
            part.renameTo(file)
        }
    }

    /** What was said; empty if there is no conversation, or it is another model's. */
    private suspend fun restore(begun: EdgeSession): String {
        val bytes = withContext(Dispatchers.IO) { if (file.exists()) file.readBytes() else byteArrayOf() }
        val line = bytes.indexOf('\n'.code.toByte())
        val size = bytes.decodeToString(0, maxOf(0, line)).toIntOrNull() ?: return ""
        return try {
            begun.load(bytes.copyOfRange(line + 1 + size, bytes.size))
            bytes.decodeToString(line + 1, line + 1 + size)
        } catch (failed: EdgeException) {
            ""
        }
    }

    /** A running answer ends before its next token. */
    override fun close() {
        closed = true
        scope.cancel()
        trimming?.close()
        session?.close()
    }

    private companion object {
        val OPTIONS = EdgeOptions(maxTokens = 512, headroom = 0.9)
        var opened: EdgeModel? = null // once for the process

        @Synchronized
        fun model(context: Context) = opened ?: EdgeModel.fromAssets(context).also { opened = it }
    }
}

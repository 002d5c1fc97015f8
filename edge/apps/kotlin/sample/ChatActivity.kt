package com.example.chat

import android.app.Activity
import android.content.Context
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import edge.runtime.*
import java.io.Closeable
import java.io.IOException
import kotlinx.coroutines.*

/** A chat: answers appear as they are generated, the button cancels them, a line shows memory and energy. */
class ChatActivity : Activity() {
    private val scope = MainScope()
    private lateinit var conversation: TextView
    private lateinit var status: TextView
    private lateinit var send: Button
    @Volatile private var session: EdgeSession? = null
    private var trimming: Closeable? = null
    private var answer: Job? = null

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        conversation = TextView(this)
        status = TextView(this)
        send = Button(this)
        val question = EditText(this)
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL }
        val rest = LinearLayout.LayoutParams(LinearLayout.LayoutParams.MATCH_PARENT, 0, 1f)
        column.addView(ScrollView(this).apply { addView(conversation) }, rest)
        for (view in listOf(status, question, send)) column.addView(view)
        setContentView(column)
        send.text = "Loading"
        send.isEnabled = false
        send.setOnClickListener {
            val running = answer
            if (running != null) running.cancel() else if (question.text.isNotEmpty()) {
                ask(question.text.toString())
                question.setText("")
            }
        }
        scope.launch { open() }
    }

    private suspend fun open() = try {
        val sensors = AndroidSensors(this)
        val begun = withContext(Dispatchers.IO) {
            model(applicationContext).session(EdgeOptions(headroom = 0.9), sensors).also {
                session = it
                if (isDestroyed) it.close()
            }
        }
        trimming = begun.trimInBackground(this)
        send.text = "Send"
        send.isEnabled = true
    } catch (failed: IOException) {
        status.text = "${failed.message}"
    } catch (failed: EdgeException) {
        status.text = "${failed.message}"
    }

    private fun ask(question: String) {
        val session = session ?: return
        conversation.append("\n> $question\n")
        send.text = "Cancel"
        answer = scope.launch {
            try {
                session.answer(question).collect { conversation.append(it) }
            } catch (failed: EdgeException) {
                conversation.append("\n${failed.message}\n")
            } finally {
                answer = null
                send.text = "Send"
            }
            val use = session.usage()
            val energy = "%.1f J %s".format(use.joules, if (use.measured) "measured" else "estimated")
            status.text = "${(use.weights + use.kv + use.scratch) shr 20} MiB, ${use.rows} KV rows, $energy"
        }
    }

    override fun onDestroy() {
        scope.cancel()
        trimming?.close()
        session?.close() // a running answer ends before its next token
        super.onDestroy()
    }

    private companion object {
        var opened: EdgeModel? = null // once for the app: activities come and go

        @Synchronized
        fun model(context: Context) = opened ?: EdgeModel.fromAssets(context).also { opened = it }
    }
}

package com.example.chat

import android.app.Activity
import android.os.Bundle
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import edge.runtime.AndroidSensors
import edge.runtime.EdgeException
import edge.runtime.EdgeModel
import edge.runtime.EdgeOptions
import edge.runtime.EdgeSession
import edge.runtime.fromAssets
import edge.runtime.trimInBackground
import java.io.Closeable
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

/** A chat: answers appear as they are generated, the button cancels them, a line shows memory and energy. */
class ChatActivity : Activity() {
    private val scope: CoroutineScope = MainScope()
    private lateinit var conversation: TextView
    private lateinit var status: TextView
    private lateinit var send: Button
    private var model: EdgeModel? = null
    private var session: EdgeSession? = null
    private var trimming: Closeable? = null
    private var answer: Job? = null

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        conversation = TextView(this)
        status = TextView(this)
        send = Button(this)
        val question = EditText(this)
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL }
        val scroll = ScrollView(this).apply { addView(conversation) }
        column.addView(scroll, LinearLayout.LayoutParams(LinearLayout.LayoutParams.MATCH_PARENT, 0, 1f))
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

    private suspend fun open() {
        val sensors = AndroidSensors(this)
        val opened = withContext(Dispatchers.IO) { EdgeModel.fromAssets(this@ChatActivity) }
        model = opened
        session = withContext(Dispatchers.IO) { opened.session(EdgeOptions(headroom = 0.9), sensors) }
            .also { trimming = it.trimInBackground(this) }
        send.text = "Send"
        send.isEnabled = true
        status.text = "${opened.info.name}, ${opened.info.isa}"
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
            val mebibytes = (use.weights + use.kv + use.scratch) shr 20
            val energy = "%.1f J %s".format(use.joules, if (use.measured) "measured" else "estimated")
            status.text = "$mebibytes MiB, ${use.rows} of ${use.capacity} rows, $energy, ${session.finish}"
        }
    }

    override fun onDestroy() {
        scope.cancel()
        trimming?.close()
        model?.close() // its session, too: a running answer ends before its next token
        super.onDestroy()
    }
}

package com.example.chat

import android.app.Activity
import android.os.Build
import android.os.Bundle
import android.view.View
import android.view.ViewGroup.LayoutParams.MATCH_PARENT
import android.view.Window
import android.view.WindowInsets
import android.view.inputmethod.EditorInfo
import android.widget.Button
import android.widget.EditText
import android.widget.LinearLayout
import android.widget.ScrollView
import android.widget.TextView
import java.io.File
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch

/** The sample's chat below views that need no AndroidX, which Robolectric alone cannot run. */
class ChatActivity : Activity() {
    private val scope = MainScope()
    private lateinit var chat: Chat

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        requestWindowFeature(Window.FEATURE_NO_TITLE)
        chat = lastNonConfigurationInstance as Chat?
            ?: Chat(Phone(this), File(noBackupFilesDir, "conversation"), CoroutineScope(Dispatchers.Main.immediate)) // as a ViewModel's
        val conversation = TextView(this).apply { setTextIsSelectable(true) }
        val scroll = ScrollView(this).apply { addView(conversation) }
        val status = TextView(this)
        val question = EditText(this).apply {
            hint = "Question"
            imeOptions = EditorInfo.IME_ACTION_SEND
            setSingleLine()
        }
        val send = Button(this)
        val column = LinearLayout(this).apply { orientation = LinearLayout.VERTICAL }
        column.addView(scroll, LinearLayout.LayoutParams(MATCH_PARENT, 0, 1f))
        for (view in listOf(status, question, send)) column.addView(view)
        keepClearOfBars(column)
        setContentView(column)

        fun sendOrCancel() {
            if (chat.screen.value.phase == Screen.Phase.ANSWERING) return chat.cancel()
            chat.ask(question.text.toString(), Mode.CHAT)
            question.setText("")
        }
        send.setOnClickListener { sendOrCancel() }
        question.setOnEditorActionListener { _, _, _ ->
            if (chat.screen.value.phase == Screen.Phase.READY) sendOrCancel()
            true
        }
        followText(scroll, conversation)
        scope.launch {
            chat.screen.collect { screen ->
                conversation.text = screen.turns.joinToString("\n") { it.text }
                status.text = screen.status
                send.text = when (screen.phase) {
                    Screen.Phase.LOADING -> "Loading"
                    Screen.Phase.ANSWERING -> "Cancel"
                    else -> "Send"
                }
                send.isEnabled = screen.phase == Screen.Phase.READY || screen.phase == Screen.Phase.ANSWERING
            }
        }
    }

    /** From target 35 on, apps draw below the system's bars; the keyboard's inset is among these. */
    private fun keepClearOfBars(view: View) = view.setOnApplyWindowInsetsListener { _, insets ->
        if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.R) {
            val kinds = WindowInsets.Type.systemBars() or WindowInsets.Type.displayCutout() or WindowInsets.Type.ime()
            val bars = insets.getInsets(kinds)
            view.setPadding(bars.left, bars.top, bars.right, bars.bottom)
        } else {
            @Suppress("DEPRECATION")
            insets.run {
                view.setPadding(systemWindowInsetLeft, systemWindowInsetTop, systemWindowInsetRight, systemWindowInsetBottom)
            }
        }
        insets
    }

    /** Scrolls with the text, unless somebody has scrolled up to read. */
    private fun followText(scroll: ScrollView, text: TextView) =
        text.addOnLayoutChangeListener { _, _, _, _, bottom, _, _, _, before ->
            val wasAtEnd = scroll.scrollY + scroll.height >= before - text.lineHeight
            if (wasAtEnd && bottom != before) scroll.post { scroll.scrollTo(0, text.height) }
        }

    @Deprecated("AndroidX has ViewModel in its place")
    override fun onRetainNonConfigurationInstance(): Any = chat

    override fun onStop() {
        super.onStop()
        chat.keep()
    }

    override fun onDestroy() {
        scope.cancel()
        if (!isChangingConfigurations) chat.close()
        super.onDestroy()
    }
}

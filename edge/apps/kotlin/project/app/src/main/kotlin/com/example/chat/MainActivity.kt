package com.example.chat

import android.Manifest.permission.RECORD_AUDIO
import android.app.Activity
import android.app.Application
import android.content.ActivityNotFoundException
import android.content.Intent
import android.graphics.ImageDecoder
import android.net.Uri
import android.os.Bundle
import android.speech.RecognizerIntent
import androidx.activity.ComponentActivity
import androidx.activity.compose.rememberLauncherForActivityResult
import androidx.activity.compose.setContent
import androidx.activity.enableEdgeToEdge
import androidx.activity.result.PickVisualMediaRequest
import androidx.activity.result.contract.ActivityResultContracts.PickVisualMedia
import androidx.activity.result.contract.ActivityResultContracts.RequestPermission
import androidx.activity.result.contract.ActivityResultContracts.StartActivityForResult
import androidx.activity.viewModels
import androidx.compose.foundation.isSystemInDarkTheme
import androidx.compose.material3.MaterialTheme
import androidx.compose.material3.darkColorScheme
import androidx.compose.material3.lightColorScheme
import androidx.compose.runtime.Composable
import androidx.compose.runtime.getValue
import androidx.compose.runtime.mutableStateOf
import androidx.compose.runtime.remember
import androidx.compose.runtime.rememberCoroutineScope
import androidx.compose.runtime.setValue
import androidx.lifecycle.AndroidViewModel
import androidx.lifecycle.compose.collectAsStateWithLifecycle
import java.io.File
import java.io.IOException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

/** Holds the session while the activity is made anew, as by a rotation. */
class ChatViewModel(application: Application) : AndroidViewModel(application) {
    val chat = Chat(Phone(application), File(application.noBackupFilesDir, "conversation"), MainScope())

    override fun onCleared() = chat.close()
}

class MainActivity : ComponentActivity() {
    private val model: ChatViewModel by viewModels()

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        enableEdgeToEdge()
        setContent {
            MaterialTheme(if (isSystemInDarkTheme()) darkColorScheme() else lightColorScheme()) { App(model.chat) }
        }
    }

    /** The process may end from here on. */
    override fun onStop() {
        super.onStop()
        model.chat.keep()
    }

    @Composable
    private fun App(chat: Chat) {
        val screen by chat.screen.collectAsStateWithLifecycle()
        val scope = rememberCoroutineScope()
        var dictated by remember { mutableStateOf<(String) -> Unit>({}) }
        val pictures = rememberLauncherForActivityResult(PickVisualMedia()) { uri ->
            if (uri != null) scope.launch { read(uri)?.let(chat::show) }
        }
        val recognizer = rememberLauncherForActivityResult(StartActivityForResult()) { result ->
            val texts = result.data?.getStringArrayListExtra(RecognizerIntent.EXTRA_RESULTS)
            if (result.resultCode == Activity.RESULT_OK) texts?.firstOrNull()?.let(dictated)
        }
        val microphone = rememberLauncherForActivityResult(RequestPermission()) { if (it) chat.listen() }
        ChatScreen(
            screen,
            Actions(
                ask = chat::ask,
                cancel = chat::cancel,
                picture = { pictures.launch(PickVisualMediaRequest(PickVisualMedia.ImageOnly)) },
                speak = { write ->
                    dictated = write
                    if (screen.hears) microphone.launch(RECORD_AUDIO) else recognizer.start()
                },
            ),
        )
    }

    /** The phone's own recognizer of speech, without the network where it can. */
    private fun androidx.activity.result.ActivityResultLauncher<Intent>.start() = try {
        val intent = Intent(RecognizerIntent.ACTION_RECOGNIZE_SPEECH)
            .putExtra(RecognizerIntent.EXTRA_LANGUAGE_MODEL, RecognizerIntent.LANGUAGE_MODEL_FREE_FORM)
            .putExtra(RecognizerIntent.EXTRA_PREFER_OFFLINE, true)
        launch(intent)
    } catch (_: ActivityNotFoundException) { // this phone has none
    }

    /** Upright, as the decoder turns it, and not larger than the eyes look at. */
    private suspend fun read(uri: Uri): Picture? = withContext(Dispatchers.IO) {
        try {
            val source = ImageDecoder.createSource(contentResolver, uri)
            val bitmap = ImageDecoder.decodeBitmap(source) { decoder, info, _ ->
                decoder.allocator = ImageDecoder.ALLOCATOR_SOFTWARE
                val shrink = maxOf(info.size.width, info.size.height) / LARGEST
                if (shrink > 1) decoder.setTargetSampleSize(shrink)
            }
            Phone.pictureOf(bitmap)
        } catch (_: IOException) {
            null
        }
    }

    private companion object {
        const val LARGEST = 1024
    }
}
